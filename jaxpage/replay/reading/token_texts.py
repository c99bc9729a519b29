"""Finds the texts of the tokens of a log.

A log has only their numbers; the texts come from the tokenizer that its header names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from jaxpage.checkpoints.finding import local_model
from jaxpage.checkpoints.tokenizers import open_tokenizer
from jaxpage.replay.reading.log_reading import header_of, records_of
from jaxpage.replay.recorder import Record


def tokenizer_of_log(path: str | os.PathLike[str], model: str | None = None) -> Any | None:
    """Returns the tokenizer of a log's model, or None if it has none or is not on this machine.

    Args:
        path: The path of the log.
        model: The model; None is that of the log.

    Raises:
        EventLogError: The log is damaged.
        CheckpointError: The tokenizer cannot be loaded.
    """
    config = header_of(path)["config"]
    directory = local_model(str(model or config.get("tokenizer") or config.get("model")))
    return None if directory is None else open_tokenizer(directory)


def with_texts(
    path: str | os.PathLike[str], text_of: Callable[[int], str], until: int | None = None
) -> Iterator[Record]:
    """Yields the records of a log up to a step, with texts in the header.

    `texts` has the text of each token that was drawn or was a candidate, by its id.

    Raises:
        EventLogError: The log is damaged.
    """
    token_ids = set[int | None]()
    for record in records_of(path, until):
        if record["event"] == "result":
            token_ids.update(
                record["tokens"], *(ids for _, _, ids, _ in record.get("logprobs", ()))
            )
    texts = {
        token_id: text_of(token_id)
        for token_id in token_ids
        if token_id is not None and token_id >= 0
    }
    yield {**header_of(path), "texts": texts}
    yield from records_of(path, until)
