"""Reads the header of one safetensors file, strictly.

It is 8 bytes of length, JSON, and ranges that cover the data exactly. The library accepts
duplicate keys and cannot name a float8 tensor, and the header alone says how large a model is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpage.checkpoints.files import parse_object
from jaxpage.checkpoints.problems import Problems, quote

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_RANK = 32

# Every type of the format and its width in bits; `fitting` says which of them a model may use.
DTYPE_BITS = {
    **{
        "BOOL": 8,
        "U8": 8,
        "I8": 8,
        "U16": 16,
        "I16": 16,
        "U32": 32,
        "I32": 32,
        "U64": 64,
        "I64": 64,
    },
    **{"F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
}


@dataclass(frozen=True)
class TensorInfo:
    """Describes a stored tensor, whose bytes are little endian and row major.

    Attributes:
        name: The name.
        dtype: The type as safetensors spells it: "F32", "BF16", "F16", ...
        shape: The shape.
        file: The file that holds it.
        offset: The place of its first byte.
        num_bytes: The number of its bytes.
        label: The name of its file, for messages; empty if there is only one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int
    label: str = field(default="", kw_only=True)

    @property
    def described(self) -> str:
        """Returns the name of its file, if it has a label, and its own, for messages."""
        return (
            f"{self.label}: tensor {quote(self.name)}"
            if self.label
            else f"tensor {quote(self.name)}"
        )


def read_header(file: Path, label: str, problems: Problems) -> dict[str, TensorInfo]:
    """Returns every tensor of `file` by name.

    It reads the header only, and never more bytes than the file has. Errors are added to `problems`
    under the name `label`.
    """
    try:
        num_bytes = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if num_bytes < 8:
                problems.add(f"{label}: {num_bytes} bytes are too short for a safetensors file")
                return {}
            if header_bytes > MAX_HEADER_BYTES or header_bytes > num_bytes - 8:
                limit = min(MAX_HEADER_BYTES, num_bytes - 8)
                problems.add(
                    f"{label}: the header claims {header_bytes} bytes, and at most {limit} are "
                    "possible"
                )
                return {}
            raw = stream.read(header_bytes)
    except OSError as error:
        problems.add(f"{label}: cannot be read: {error.strerror}")
        return {}
    try:
        # The format wants the brace as the first byte; only at the end may a header have spaces.
        if not raw.startswith(b"{"):
            raise ValueError("does not start with an object")
        header = parse_object(raw)
    except ValueError as error:
        problems.add(f"{label}: the header {error}")
        return {}
    return _tensors(header, file, label, num_bytes, 8 + header_bytes, problems)


def _tensors(
    header: dict[str, Any], file: Path, label: str, file_bytes: int, start: int, problems: Problems
) -> dict[str, TensorInfo]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        problems.add(f"{label}: __metadata__ is not an object of strings")
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        wrong = _wrong_entry(entry)
        if wrong:
            problems.add(f"{label}: tensor {quote(name)} {wrong}")
        else:
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            place = (start + begin, end - begin)
            tensors[name] = TensorInfo(name, entry["dtype"], shape, file, *place, label=label)
    if len(tensors) == len(header):  # With an entry lost, every other range would look like a gap.
        _check_tiling(tensors, label, file_bytes, start, problems)
    return tensors


def _wrong_entry(entry: Any) -> str | None:
    """Returns what is wrong with one entry of a header by itself; None if it is sound."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "is not described by exactly dtype, shape and data_offsets"
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"has the unknown dtype {quote(dtype)}"
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        return f"has the impossible shape {quote(shape)}"
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"has the impossible data_offsets {quote(offsets)}"
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        return (
            f"is {dtype} of shape {quote(shape)}, which does not fill its "
            f"{offsets[1] - offsets[0]} bytes"
        )
    return None


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size < 2**63 for size in value
    )


def _check_tiling(
    tensors: dict[str, TensorInfo], label: str, file_bytes: int, start: int, problems: Problems
) -> None:
    """Checks that the ranges follow one another from the end of the header to that of the file."""
    position = start
    # An empty tensor may begin where another one does, and comes before it.
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != position:
            kind = (
                "overlaps the tensor before it"
                if tensor.offset < position
                else "leaves a gap before it"
            )
            problems.add(
                f"{label}: tensor {quote(tensor.name)} {kind} (at byte {tensor.offset}, not "
                f"{position})"
            )
        position = max(position, tensor.offset + tensor.num_bytes)
    if position > file_bytes:
        problems.add(
            f"{label}: truncated: the tensors need {position} bytes, the file has {file_bytes}"
        )
    elif position < file_bytes:
        problems.add(f"{label}: {file_bytes - position} trailing bytes belong to no tensor")
