"""Hashes weights and tokenizers, so that the hash is the same however an engine holds them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from tqdm import tqdm

_HASHED_AT_ONCE = 4  # the most tensors that are on the host at a time


def hash_text(text: str) -> str:
    """Returns the SHA-256 of a text in UTF-8, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def hash_tensors(
    tensors: Iterable[tuple[str, Any]], num_bytes: int, *, progress: bool = False
) -> dict[str, str]:
    """Returns the hash of each tensor: the SHA-256 of its type, its shape and its bytes.

    The hash of a tensor is that of a line such as `bfloat16 [64, 128]` and of its numbers after it,
    row by row and little-endian.

    Args:
        tensors: The tensors with their names, each of which is made when it is asked for.
        num_bytes: The bytes of all of them together, for the bar.
        progress: True shows a bar on standard error.
    """
    hashes: dict[str, str] = {}
    with (
        tqdm(
            total=num_bytes,
            desc="Hashing weights",
            unit="B",
            unit_scale=True,
            disable=None if progress else True,
        ) as bar,
        ThreadPoolExecutor(_HASHED_AT_ONCE) as pool,
    ):
        for batch in _batches(tensors):
            for name, size, digest in pool.map(_hash_named, batch):
                hashes[name] = digest
                bar.update(size)
    return hashes


def _batches(tensors: Iterable[tuple[str, Any]]) -> Iterable[list[tuple[str, Any]]]:
    """Yields a few tensors at a time, so that few copies are on the host."""
    batch: list[tuple[str, Any]] = []
    for tensor in tensors:
        batch.append(tensor)
        if len(batch) == _HASHED_AT_ONCE:
            yield batch
            batch = []
    yield batch


def _hash_named(tensor: tuple[str, Any]) -> tuple[str, int, str]:
    """Returns the name of a tensor, its bytes, and its hash."""
    name, values = tensor
    array = np.asarray(values)
    digest = hashlib.sha256(f"{array.dtype.name} {list(array.shape)}\n".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return name, array.nbytes, digest.hexdigest()


def hash_weights(tensors: Mapping[str, str]) -> str:
    """Returns the hash of all tensors: that of lines as `sha256sum` prints them, by name."""
    return hash_text("".join(f"{tensors[name]}  {name}\n" for name in sorted(tensors)))


def hash_tokenizer(tokenizer: Any | None) -> str | None:
    """Returns the hash of a tokenizer of transformers; None for None.

    Truncation and padding are left out, because a call may change them.
    """
    if tokenizer is None:
        return None
    contents = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("truncation", "padding"):
        contents.pop(name, None)
    contents["special"] = sorted(map(int, tokenizer.all_special_ids))
    return hash_text(json.dumps(contents, sort_keys=True))
