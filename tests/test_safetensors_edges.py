"""The bounds of safetensors headers and of shards, from both sides: what just fits is taken, and
the next is not.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpage.checkpoints import safetensors_header
from jaxpage.checkpoints.problems import Problems
from jaxpage.checkpoints.safetensors_files import SINGLE, write_safetensors
from jaxpage.checkpoints.safetensors_header import MAX_HEADER_BYTES, read_header


def problems_of(tmp_path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> list[str]:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    problems = Problems(tmp_path)
    tensors = read_header(tmp_path / SINGLE, SINGLE, problems)
    assert problems or len(tensors) == len(json.loads(raw))
    return problems.lines


def entry(begin: int, end: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("names", ["abc", "bac", "cab", "cba"])
def test_empty_tensors_may_stand_anywhere_in_the_list(tmp_path, names):
    """They stand at the offset of their neighbour, before it or after it in the header, and at the
    end of the file.
    """
    entries = {"a": entry(0, 8, 2), "b": entry(0, 0, 0), "c": entry(8, 8, 3, 0)}
    assert problems_of(tmp_path, {name: entries[name] for name in names}, bytes(8)) == []
    assert "overlaps" in problems_of(tmp_path, {**entries, "d": entry(4, 4, 0)}, bytes(8))[0]


@pytest.mark.parametrize(("size", "is_taken"), [(2**63 - 1, True), (2**63, False)])
def test_a_size_is_below_two_to_the_63(tmp_path, size, is_taken):
    assert bool(problems_of(tmp_path, {"a": entry(0, 0, size, 0)})) != is_taken


@pytest.mark.parametrize(("rank", "is_taken"), [(0, True), (32, True), (33, False)])
def test_a_tensor_has_at_most_32_axes(tmp_path, rank, is_taken):
    assert bool(problems_of(tmp_path, {"a": entry(0, 4, *[1] * rank)}, bytes(4))) != is_taken


def test_a_header_that_is_too_long_is_not_read(tmp_path, monkeypatch):
    """The file has as many bytes as it claims: a hole.

    A header that is exactly as long as allowed is read.
    """
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(2 * MAX_HEADER_BYTES)
    problems = Problems(tmp_path)
    assert read_header(tmp_path / SINGLE, SINGLE, problems) == {}
    claims = (
        f"the header claims {MAX_HEADER_BYTES + 1} bytes, and at most {MAX_HEADER_BYTES} are "
        "possible"
    )
    assert problems.lines == [f"{SINGLE}: {claims}"]
    header = {"a": entry(0, 4, 1)}
    for allowed, is_taken in (
        (len(json.dumps(header)), True),
        (len(json.dumps(header)) - 1, False),
    ):
        monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", allowed)
        assert bool(problems_of(tmp_path, header, bytes(4))) != is_taken


@pytest.mark.parametrize(
    ("max_shard_bytes", "files"), [(24, 1), (23, 2), (16, 2), (15, 3), (8, 3), (1, 3)]
)
def test_what_fills_a_shard_exactly_stays_in_one(tmp_path, max_shard_bytes, files):
    """There are three tensors of eight bytes."""
    arrays = {name: np.full(2, index, np.float32) for index, name in enumerate("abc")}
    tensors = [(name, array.dtype, array.shape) for name, array in arrays.items()]
    write_safetensors(tmp_path, tensors, iter(arrays.values()), max_shard_bytes)
    paths = sorted(tmp_path.glob("*.safetensors"))
    assert len(paths) == files and (paths[0].name == SINGLE) == (files == 1)
    loaded = {name: array for file in paths for name, array in load_file(file).items()}
    assert {name: array.tolist() for name, array in loaded.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
