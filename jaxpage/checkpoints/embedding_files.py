"""Reads the files that sentence-transformers puts next to a model that embeds texts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from jaxpage.checkpoints.files import has_file, read_object
from jaxpage.errors import CheckpointError

POOLING_FILE = "1_Pooling/config.json"
PROMPTS_FILE = "config_sentence_transformers.json"
EMBEDDING_FILES = (POOLING_FILE, PROMPTS_FILE)


class EmbeddingFiles(NamedTuple):
    """Says how a model embeds.

    Attributes:
        pooling: The way in which the vectors of tokens become one.
        query_prompt: The text before a query; empty if there is none.
    """

    pooling: Literal["last", "mean"]
    query_prompt: str


def read_embedding_files(directory: Path) -> EmbeddingFiles | None:
    """Returns what the files say, or None for a model that has no pooling.

    Raises:
        CheckpointError: A file is no JSON object, or names a pooling that decoders do not have.
    """
    if not has_file(directory, POOLING_FILE):
        return None
    pooling = read_object(directory, POOLING_FILE)
    modes = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
    chosen = [name for name, value in pooling.items() if value is True and "pooling_mode" in name]
    if len(chosen) != 1 or chosen[0] not in modes:
        raise CheckpointError(
            f"{POOLING_FILE} must have one of {', '.join(modes)}; it has {', '.join(chosen) or 'none'}"
        )
    prompts = (
        read_object(directory, PROMPTS_FILE).get("prompts")
        if has_file(directory, PROMPTS_FILE)
        else None
    )
    query = prompts.get("query", "") if isinstance(prompts, dict) else ""
    if not isinstance(query, str):
        raise CheckpointError(f"{PROMPTS_FILE}: prompts.query must be a string")
    return EmbeddingFiles("last" if modes[chosen[0]] == "last" else "mean", query)
