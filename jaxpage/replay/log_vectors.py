"""Keeps what takes the place of tokens next to an event log, each source once by its key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from jaxpage.replay.recorder import Record
from jaxpage.step.embedded import EmbeddedPrompt, EmbeddedSpan, Picture, Vectors

_ROWS = "rows of vectors"  # the name of the array of vectors that a caller gave
_NUM_ROWS = "number of rows"  # that of a picture


def directory_of_log(path: str | os.PathLike[str]) -> Path:
    """Returns the directory with the sources of a log, which has the log's name and an ending."""
    return Path(f"{os.fspath(path)}.vectors")


def weights_of_log(path: str | os.PathLike[str]) -> Path:
    """Returns the directory with the arrays of a log, which has the log's name and an ending."""
    return Path(f"{os.fspath(path)}.weights")


def write_sources(directory: Path, embedded: EmbeddedPrompt) -> None:
    """Writes the sources of a prompt that have no file yet; only the owner can read them.

    Raises:
        OSError: A file cannot be written.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    for key, source in embedded.sources.items():
        path = directory / f"{key.hex()}.safetensors"
        if path.exists():
            continue
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "wb") as opened:
            opened.write(save(_arrays_of(source)))


def _arrays_of(source: Vectors | Picture) -> dict[str, Any]:
    if isinstance(source, Vectors):  # every type of activations fits into float32
        return {_ROWS: source.rows.astype(np.float32)}
    arrays = {name: np.ascontiguousarray(array) for name, array in source.arrays.items()}
    return {**arrays, _NUM_ROWS: np.array([source.num_rows])}


def read_embedded(record: Record, directory: Path) -> EmbeddedPrompt | None:
    """Returns what an arrival has besides its tokens; None if it has nothing.

    Args:
        record: The record of the arrival.
        directory: The directory with the sources of the log.

    Raises:
        LookupError, TypeError, ValueError: The record is not valid, or a file is missing or
            damaged.
    """
    if "embedded" not in record:
        return None
    spans = tuple(
        EmbeddedSpan(start, length, bytes.fromhex(key), offset, is_whole=is_whole)
        for start, length, key, offset, is_whole in record["embedded"]
    )
    return EmbeddedPrompt(spans, {span.key: _read(directory, span.key) for span in spans})


def _read(directory: Path, key: bytes) -> Vectors | Picture:
    path = directory / f"{key.hex()}.safetensors"
    try:
        arrays = load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if _ROWS in arrays:
        return Vectors(arrays[_ROWS])
    return Picture(arrays, int(arrays.pop(_NUM_ROWS)[0]))
