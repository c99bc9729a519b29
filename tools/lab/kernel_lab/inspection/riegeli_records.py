"""Reads the records of a serialised executable.

XLA writes it as Riegeli files of snappy chunks, one inside the other. Only what XLA writes is read:
simple chunks, plain or in snappy.

Formats: https://github.com/google/riegeli (doc/riegeli_records_file_format.md) and
https://github.com/google/snappy (format_description.txt).
"""

from __future__ import annotations

from collections.abc import Iterator

# The first bytes of a Riegeli file are the hash of its first block header.
SIGNATURE = bytes.fromhex("83af70d10d884a3f")
BLOCK_BYTES = 1 << 16  # a header interrupts the chunks at every multiple of these bytes
BLOCK_HEADER_BYTES = 24
CHUNK_HEADER_BYTES = 40
_PLAIN, _SNAPPY = 0, ord("s")


class FormatError(ValueError):
    """Says that bytes do not have the format that was expected."""


def leaves(data: bytes) -> Iterator[bytes]:
    """Yields the records of all Riegeli files in `data`, unpacked until none holds another.

    Where `data` holds no file, it is the only record.
    """
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
    """Yields the kind and data of every chunk; bytes after the file begin no chunk and end it."""
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
    sizes = _unpack(data[at : at + sizes_bytes], compression)
    values = _unpack(data[at + sizes_bytes :], compression)
    at = start = 0
    while at < len(sizes):
        size, at = varint(sizes, at)
        yield values[start : start + size]
        start += size


def _unpack(data: bytes, compression: int) -> bytes:
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
    """Returns the number that begins at `at`, and where it ends.

    A number has seven bits in a byte, the lowest first.
    """
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
    """Unpacks one snappy block.

    Raises:
        FormatError: The bytes are not one whole block.
    """
    size, at = varint(data, 0)
    out = bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        kind = tag & 3
        if kind == 0:  # a literal
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
        else:  # the copy reads bytes that it writes itself
            out += (out[start:] * -(-length // distance))[:length]
    if len(out) != size:
        raise FormatError(f"{len(out)} bytes unpacked where {size} were promised")
    return bytes(out)
