"""Writes, in small, the formats that `tools.lab.kernel_lab.inspection` reads: snappy, Riegeli,
Protocol Buffers and CUDA's ELF images.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

SIGNATURE = bytes.fromhex("83af70d10d884a3f")


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def snappy(data: bytes) -> bytes:
    """Packs with copies of all three widths, by the distance, wherever four bytes were seen before.

    The rest stays as it is.
    """
    out, at, plain, seen = bytearray(varint(len(data))), 0, 0, dict[bytes, int]()

    def literal(chunk: bytes) -> None:
        if not chunk:
            return
        size = len(chunk) - 1
        out.extend(bytes([size << 2]) if size < 60 else bytes([61 << 2]) + struct.pack("<H", size))
        out.extend(chunk)

    while at < len(data):
        key = data[at : at + 4]
        before = seen.get(key)
        seen[key] = at
        if before is None or len(key) < 4:
            at += 1
            continue
        literal(data[plain:at])
        length = 4
        while (
            length < 64 and at + length < len(data) and data[before + length] == data[at + length]
        ):
            length += 1
        distance = at - before
        if distance < 2048 and length < 12:
            out += bytes([1 | length - 4 << 2 | distance >> 8 << 5, distance & 255])
        elif distance < 1 << 16:
            out += bytes([2 | length - 1 << 2]) + struct.pack("<H", distance)
        else:
            out += bytes([3 | length - 1 << 2]) + struct.pack("<I", distance)
        at += length
        plain = at
    literal(data[plain:])
    return bytes(out)


def riegeli(records: list[bytes], *, packed: bool = True) -> bytes:
    """Returns a file of simple chunks of up to three records.

    Hashes are left zero: nobody checks them.
    """
    stream = bytes(24) + b"s" + bytes(15)  # the chunk that every file begins with
    for start in range(0, len(records), 3):
        stream += _chunk(records[start : start + 3], packed)
    room = (1 << 16) - 24
    blocks = [stream[start : start + room] for start in range(0, len(stream), room)]
    headers = [SIGNATURE + bytes(16), *[bytes(24)] * (len(blocks) - 1)]
    return b"".join(header + block for header, block in zip(headers, blocks, strict=True))


def _chunk(records: list[bytes], packed: bool) -> bytes:
    sizes, values = b"".join(varint(len(record)) for record in records), b"".join(records)
    if packed:
        sizes, values = (varint(len(part)) + snappy(part) for part in (sizes, values))
    data = (b"s" if packed else b"\0") + varint(len(sizes)) + sizes + values
    return (
        bytes(8)
        + struct.pack("<Q", len(data))
        + bytes(8)
        + b"r"
        + len(records).to_bytes(7, "little")
        + bytes(8)
        + data
    )


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """Returns a Protocol Buffer of numbers and bytes."""
    out = b""
    for field, value in fields:
        if isinstance(value, int):
            out += varint(field << 3) + varint(value)
        else:
            out += varint(field << 3 | 2) + varint(len(value)) + value
    return out


def image(
    kernels: dict[str, tuple[int, int, int]],
    *,
    machine: int = 190,
    code: bytes = b"code",
    attributes: bool = True,
) -> bytes:
    """Returns an ELF image; kernels: (registers, stack bytes, static shared bytes) by name."""
    symbol_names = _strings(kernels)
    symbols = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", symbol_names.index(name.encode() + b"\0"), 0x12, 0, 0, 0, 0)
        for name in kernels
    )
    info = b"\x02\x5f\x07\x00"  # an attribute of a byte, which is stepped over
    for index, (registers, stack, _) in enumerate(kernels.values(), start=1):
        info += struct.pack("<BBHII", 4, 0x2F, 8, index, registers) + struct.pack(
            "<BBHII", 4, 0x11, 8, index, stack
        )
    sections = {".strtab": symbol_names, ".symtab": symbols} | (
        {".nv.info": info} if attributes else {}
    )
    sections |= {f".text.{name}": code for name in kernels}
    empty = {
        f".nv.shared.{name}": 1024 + shared for name, (_, _, shared) in kernels.items() if shared
    }
    if empty:
        empty[".nv.shared.reserved.0"] = 0  # says that the first 1024 bytes are CUDA's
    names = _strings([*sections, *empty, ".shstrtab"])
    sections[".shstrtab"] = names
    at, body, headers = 64, b"", [bytes(64)]
    order = [*sections, *empty]
    for name in order:
        content = sections.get(name, b"")
        link = 1 + order.index(".strtab") if name == ".symtab" else 0
        start, size = names.index(name.encode() + b"\0"), len(content) or empty.get(name, 0)
        headers.append(
            struct.pack("<IIQQQQIIQQ", start, 1, 0, 0, at + len(body), size, link, 0, 1, 0)
        )
        body += content
    header = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQ", 2, machine, 1, 0, 0, at + len(body))
    )
    header += struct.pack("<IHHHHHH", 0, 64, 56, 0, 64, len(headers), 1 + order.index(".shstrtab"))
    return header + body + b"".join(headers)


def _strings(names: Iterable[str]) -> bytes:
    return b"\0" + b"".join(name.encode() + b"\0" for name in names)
