"""The records of a serialised executable. XLA writes it as Riegeli files of snappy chunks, one inside the other.

Formats: https://github.com/google/riegeli (doc/riegeli_records_file_format.md) and https://github.com/google/snappy
(format_description.txt). Only what XLA writes is read: simple chunks, plain or in snappy.
"""

from __future__ import annotations

from collections.abc import Iterator

# the first bytes of a Riegeli file: the hash of its first block header
SIGNATURE = bytes.fromhex("83af70d10d884a3f")
BLOCK_BYTES = 1 << 16  # every so many bytes a header interrupts the chunks
BLOCK_HEADER_BYTES = 24
CHUNK_HEADER_BYTES = 40
_PLAIN, _SNAPPY = 0, ord("s")


class FormatError(ValueError):
    """Bytes that are not what they were taken for."""


def leaves(data: bytes) -> Iterator[bytes]:
    """The records of all Riegeli files in `data`, unpacked until none holds another; `data` itself where it holds none."""
    start = data.find(SIGNATURE)
    if start < 0:
        yield data
        return
    for record in _records(data[start:]):
        yield from leaves(record)


def _records(file: bytes) -> Iterator[bytes]:
    for kind, data in _chunks(file):
        if kind == b"r":
            yield from _simple_chunk(data)
        elif kind == b"t":
            raise FormatError("a transposed chunk, which XLA did not write when this was made")


def _chunks(file: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Kind and data of every chunk. What follows the file ends it: it begins no chunk."""
    stream = b"".join(
        file[start + BLOCK_HEADER_BYTES : start + BLOCK_BYTES]
        for start in range(0, len(file), BLOCK_BYTES)
    )
    at = 0
    while at + CHUNK_HEADER_BYTES <= len(stream):
        size = int.from_bytes(stream[at + 8 : at + 16], "little")
        kind = stream[at + 24 : at + 25]
        num_records = int.from_bytes(stream[at + 25 : at + 32], "little")
        end = at + CHUNK_HEADER_BYTES + size
        if kind not in (b"s", b"m", b"p", b"r", b"t") or end > len(stream):
            return
        yield kind, stream[at + CHUNK_HEADER_BYTES : end]
        at = max(end, at + num_records)  # a chunk has at least a byte per record


def _simple_chunk(data: bytes) -> Iterator[bytes]:
    compression = data[0]
    sizes_bytes, at = varint(data, 1)
    sizes = _unpacked(data[at : at + sizes_bytes], compression)
    values = _unpacked(data[at + sizes_bytes :], compression)
    at = start = 0
    while at < len(sizes):
        size, at = varint(sizes, at)
        yield values[start : start + size]
        start += size


def _unpacked(data: bytes, compression: int) -> bytes:
    if compression == _PLAIN:
        return data
    if compression != _SNAPPY:
        raise FormatError(
            f"a chunk packed with {chr(compression)!r}; only plain chunks and snappy are read"
        )
    size, at = varint(data, 0)
    unpacked = unpack_snappy(data[at:])
    if len(unpacked) != size:
        raise FormatError(f"a chunk of {len(unpacked)} bytes that says it has {size}")
    return unpacked


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, seven bits a byte from the lowest, and where it ends."""
    value = shift = 0
    while True:
        if at >= len(data):
            raise FormatError("the end within a number")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def unpack_snappy(data: bytes) -> bytes:
    """Raises FormatError for what is not one whole snappy block."""
    size, at = varint(data, 0)
    out = bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        kind = tag & 3
        if kind == 0:  # bytes as they are
            length = tag >> 2
            if length >= 60:  # the length follows, in one to four bytes
                width = length - 59
                length = int.from_bytes(data[at : at + width], "little")
                at += width
            out += data[at : at + length + 1]
            at += length + 1
            continue
        if kind == 1:
            length, distance = (tag >> 2 & 7) + 4, tag >> 5 << 8 | data[at]
            at += 1
        else:
            width = 2 if kind == 2 else 4
            length, distance = (tag >> 2) + 1, int.from_bytes(data[at : at + width], "little")
            at += width
        start = len(out) - distance
        if distance == 0 or start < 0:
            raise FormatError(f"a copy from {distance} bytes back where there are {len(out)}")
        if length <= distance:
            out += out[start : start + length]
        else:  # it runs into what it writes
            out += (out[start:] * -(-length // distance))[:length]
    if len(out) != size:
        raise FormatError(f"{len(out)} bytes unpacked where {size} were promised")
    return bytes(out)
