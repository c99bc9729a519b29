"""Reads the header of a GGUF file, strictly: metadata, and the places of tensors.

It never reads more bytes than the file has. The reader of the package `gguf` makes an array of each
string of a vocabulary (seconds at every start), and believes the counts of a damaged file. The
package still says what the numbers of tensor types mean, and what the blocks of a type hold.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxpage.checkpoints.gguf.types import PLAIN, tensor_types
from jaxpage.checkpoints.problems import quote
from jaxpage.checkpoints.safetensors_header import TensorInfo

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 200_000_000
MAX_RANK = 4  # GGML_MAX_DIMS of ggml
_ALIGNMENT = 32  # by the specification, where a file has no general.alignment

# The values of metadata by their number, as `struct` spells them.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9
_ONE_MORE = ("gemma2", "gemma3")


@dataclass(frozen=True)
class GGUFTensor(TensorInfo):
    """Describes a tensor of a GGUF file.

    `dtype` and `shape` are those of its numbers, dequantised if `kind` is of blocks.

    Attributes:
        kind: The name of the type in GGML: "Q4_1", "Q6_K", "F16", ...
        interleaved_heads: The number of heads whose rows are in the order of interleaved RoPE
            (Llama's queries and keys); 0 for none.
        one_more: True if the numbers are those of the checkpoint plus one (Gemma's norms, which
            multiply by 1 + w).
    """

    kind: str = "F32"
    interleaved_heads: int = 0
    one_more: bool = False

    @property
    def is_quantised(self) -> bool:
        """Returns whether the numbers have to be dequantised."""
        return self.kind not in PLAIN and self.dtype != "U8"

    @property
    def as_stored(self) -> GGUFTensor:
        """Returns the tensor of the bytes of its rows."""
        num_rows = math.prod(self.shape[:-1])
        return replace(self, dtype="U8", shape=(num_rows, self.num_bytes // num_rows))

    @property
    def counts_as(self) -> str:
        """Returns the dtype of a model that consists mostly of such tensors.

        It is bfloat16 for numbers of few bits: a wider type would only take more memory.
        """
        return {"F32": "float32", "F16": "float16"}.get(self.kind, "bfloat16")


@dataclass(frozen=True)
class GGUFFile:
    """Holds what the header of a file says, and what is wrong with it."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, GGUFTensor] = field(default_factory=dict)
    metadata_problems: tuple[str, ...] = ()
    tensor_problems: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        """Returns the name of the architecture."""
        return str(self.metadata.get("general.architecture"))

    def of_model(self, key: str) -> Any:
        """Returns a value of the architecture's own metadata, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")


def is_gguf(path: Path) -> bool:
    """Returns whether a path from `resolve_model` is a GGUF file. Other models are directories."""
    return path.is_file()


def is_gguf_file(path: Path) -> bool:
    """Returns whether a file is GGUF by its name, or by its first bytes."""
    if not os.path.isfile(path):
        return False
    try:
        with path.open("rb") as stream:
            return path.suffix == ".gguf" or stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GGUFFile:
    """Returns the header of a file, which is read once while the file does not change."""
    try:
        status = path.stat()
    except OSError as error:
        return GGUFFile(metadata_problems=(f"cannot be read: {error.strerror}",))
    return _read(path, status.st_size, status.st_mtime_ns)


def as_number(value: Any) -> Any:
    """Returns a float32 of metadata as the shortest decimal that means it, and others unchanged."""
    with np.errstate(over="ignore"):  # for numbers that are float64
        return float(str(np.float32(value))) if isinstance(value, float) else value


# The last argument is the time of the last change, so that a changed file is read again.
@functools.lru_cache(maxsize=2)  # a model, and one that drafts for it
def _read(path: Path, num_bytes: int, _: int) -> GGUFFile:
    # The magic number and the version have 4 bytes each, the two counts 8 each.
    if num_bytes < 24:
        return GGUFFile(metadata_problems=(f"{num_bytes} bytes are too short for a GGUF file",))
    metadata: dict[str, Any] = {}
    try:
        with (
            path.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            cursor = _Cursor(data, min(num_bytes, MAX_HEADER_BYTES))
            num_tensors, num_values = _read_counts(cursor)
            for _index in range(num_values):
                key = cursor.string()
                if key in metadata:
                    raise ValueError(f"the metadata has {quote(key)} twice")
                metadata[key] = cursor.value(cursor.scalar("I"))
            entries = [_read_entry(cursor) for _index in range(num_tensors)]
    except OSError as error:
        return GGUFFile(metadata_problems=(f"cannot be read: {error.strerror}",))
    except ValueError as error:
        return GGUFFile(metadata_problems=(str(error),))
    return _check(path, num_bytes, metadata, entries, cursor.position)


class _Cursor:
    """Walks over the bytes of a header, and never leaves them.

    It raises ValueError instead, whose text continues a sentence on the file.
    """

    def __init__(self, data: mmap.mmap, end: int) -> None:
        self._data = data
        self._end = end
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        start = self.position
        if num_bytes > self._end - start:
            raise ValueError(
                f"truncated: {num_bytes} bytes are needed at byte {start} of its header, which "
                f"ends at {self._end}"
            )
        self.position += num_bytes
        return self._data[start : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        start = self.position
        try:
            return self.take(int.from_bytes(self.take(8), "little")).decode()
        except UnicodeDecodeError:
            raise ValueError(f"the text at byte {start} of its header is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        raise ValueError(
            f"the value before byte {self.position} of its header has the unknown type {kind}"
        )

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind in _SCALARS:
            data = self.take(length * struct.calcsize("<" + _SCALARS[kind]))
            return list(struct.unpack(f"<{length}{_SCALARS[kind]}", data))
        if kind == _STRING:
            return [self.string() for _ in range(length)]
        raise ValueError(
            f"the list before byte {self.position} of its header has values of the unknown type "
            f"{kind}"
        )


@dataclass(frozen=True)
class _Entry:
    """Holds what the header says of a tensor."""

    name: str
    sizes: tuple[int, ...]  # the innermost first
    kind: int
    offset: int  # counted from the start of the data


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    if (magic := cursor.take(4)) != MAGIC:
        raise ValueError(f"is not a GGUF file: it begins with {quote(magic)}, not {quote(MAGIC)}")
    version = cursor.scalar("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = "is big-endian" if swapped in VERSIONS else f"has version {version}"
        raise ValueError(
            f"{kind}; little-endian files of version {' or '.join(map(str, VERSIONS))} are read"
        )
    return cursor.scalar("Q"), cursor.scalar("Q")


def _read_entry(cursor: _Cursor) -> _Entry:
    name = cursor.string()
    rank = cursor.scalar("I")
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"tensor {quote(name)} has {rank} axes, not 1 to {MAX_RANK}")
    sizes = tuple(cursor.scalar("Q") for _ in range(rank))
    return _Entry(name, sizes, cursor.scalar("I"), cursor.scalar("Q"))


def _check(
    path: Path, num_bytes: int, metadata: dict[str, Any], entries: list[_Entry], end: int
) -> GGUFFile:
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        return GGUFFile(
            metadata,
            metadata_problems=(f"general.alignment is {quote(alignment)}, not a power of two",),
        )
    # The data begin at the next multiple of the alignment, as GGUF's specification says.
    start = end + -end % alignment
    problems = []
    tensors: dict[str, GGUFTensor] = {}
    types = tensor_types()
    wrong_types = dict[str, int]()
    for entry in entries:
        kind = types.get(entry.kind)
        if kind is None or not kind.is_read:
            name = f"number {entry.kind}" if kind is None else kind.name
            wrong_types[name] = wrong_types.get(name, 0) + 1
        elif entry.name in tensors:
            problems.append(f"tensor {quote(entry.name)} is there twice")
        elif entry.sizes[0] % kind.block or min(entry.sizes) < 1 or entry.offset % alignment:
            problems.append(
                f"tensor {quote(entry.name)} has {kind.name} rows of {entry.sizes[0]} numbers, "
                f"shape {entry.sizes[::-1]} and offset "
                f"{entry.offset}: rows must fill blocks of {kind.block}, and offsets are multiples "
                f"of {alignment}"
            )
        else:
            length = math.prod(entry.sizes) // kind.block * kind.num_bytes
            place = start + entry.offset
            heads = _num_interleaved_heads(metadata, entry.name)
            code = PLAIN.get(kind.name, "F32")
            one_more = metadata.get("general.architecture") in _ONE_MORE and entry.name.endswith(
                "norm.weight"
            )
            order = kind.name, heads, one_more
            tensors[entry.name] = GGUFTensor(
                entry.name, code, entry.sizes[::-1], path, place, length, *order
            )
    for name, count in wrong_types.items():
        read = ", ".join(kind.name for kind in types.values() if kind.is_read)
        problems.append(
            f"{count} tensors are of the type {name}, which cannot be dequantised; those that can: "
            f"{read}"
        )
    problems += _find_misplaced(tensors, num_bytes)
    return GGUFFile(metadata, tensors, (), tuple(problems))


def _find_misplaced(tensors: Mapping[str, GGUFTensor], num_bytes: int) -> list[str]:
    """Returns what is wrong with the places of tensors."""
    problems = []
    position = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < position:
            problems.append(
                f"tensor {quote(tensor.name)} overlaps the tensor before it (at byte "
                f"{tensor.offset}, not {position})"
            )
        position = max(position, tensor.offset + tensor.num_bytes)
    if position > num_bytes:
        problems.append(f"truncated: the tensors need {position} bytes, the file has {num_bytes}")
    return problems


def _num_interleaved_heads(metadata: Mapping[str, Any], name: str) -> int:
    """Returns the number of heads whose rows llama.cpp reordered for its RoPE; 0 for none.

    It reorders the rows of queries and keys, in files of the architecture "llama" alone.
    """
    part = name.rpartition(".")[0].rpartition(".")[2]
    if metadata.get("general.architecture") != "llama" or part not in ("attn_q", "attn_k"):
        return 0
    heads = metadata.get("llama.attention.head_count")
    if part == "attn_k":
        heads = metadata.get("llama.attention.head_count_kv", heads)
    # A value that is no integer is refused in the config.
    return heads if type(heads) is int else 0
