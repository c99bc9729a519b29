"""Reads texts from files as tokens of a model, where random tokens would distort a measurement."""

from __future__ import annotations

from pathlib import Path

from jaxpage.checkpoints.tokenizers import tokenizer_of
from jaxpage.errors import UsageError
from jaxpage.settings.engine_config import EngineConfig


def read_token_ids(path: str, config: EngineConfig) -> list[int]:
    """Returns the token ids of a text.

    Raises:
        UsageError: The model has no tokenizer, or the file cannot be read.
    """
    tokenizer = tokenizer_of(config)
    if tokenizer is None:
        raise UsageError(f"--text {path}: the model {config.model!r} has no tokenizer")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {path}: {error}") from None
    token_ids: list[int] = tokenizer(text)["input_ids"]
    return token_ids
