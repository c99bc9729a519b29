"""Reads the machine code of kernels: CUDA's ELF images, and their data about each kernel.

The layout was read off images of CUDA 13 for sm_90 and compared with `cuobjdump -res-usage`, which
counts CUDA's own shared memory as the kernel's. NVIDIA documents none of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

ELF = b"\x7fELF"
_CUDA = 190  # EM_CUDA, the machine
_SECTION_BYTES, _SYMBOL_BYTES = 64, 24
_REGCOUNT, _FRAME_SIZE = 0x2F, 0x11  # EIATTR_...: attributes in the section .nv.info
_SIZED = 4  # EIFMT_SVAL: the form of an attribute whose size follows
_RESERVED, _RESERVED_BYTES = (
    ".nv.shared.reserved.0",
    1024,
)  # where this section exists, a kernel's own section begins with CUDA's part


@dataclass(frozen=True)
class Machine:
    """Holds what an image says about one kernel."""

    name: str
    registers: int  # per thread, at most 255; Mosaic's warps may trade theirs at run time
    stack_bytes: int  # per thread: registers spilled to memory, and arrays indexed at run time
    static_shared_bytes: int  # per program, without the 1024 that CUDA keeps on a Hopper


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int
    size: int
    link: int  # the index of the section with the names of a symbol table


def images(data: bytes) -> Iterator[bytes]:
    """Yields every CUDA image in `data`, wherever it lies.

    An image may lie inside another machine's image: Mosaic of jax 0.10 puts its own there.
    """
    at = data.find(ELF)
    while at >= 0:
        header = data[at : at + 64]
        if (
            len(header) == 64
            and header[4:6] == b"\x02\x01"
            and struct.unpack_from("<H", header, 18)[0] == _CUDA
        ):
            program_offset, section_offset = struct.unpack_from("<QQ", header, 32)
            num_programs, num_sections = (
                struct.unpack_from("<H", header, place)[0] for place in (56, 60)
            )
            size = max(
                section_offset + _SECTION_BYTES * num_sections, program_offset + 56 * num_programs
            )
            yield data[at : at + size]
            at = data.find(ELF, at + size)
        else:
            at = data.find(ELF, at + len(ELF))


def machines(image: bytes) -> list[Machine]:
    """Returns the kernels of an image.

    Raises:
        ValueError: The image does not say how many registers a kernel has.
    """
    sections = list(_sections(image))
    by_name = {section.name: section for section in sections}
    attributes = _attributes(image, by_name[".nv.info"]) if ".nv.info" in by_name else {}
    symbols = _symbols(image, sections, by_name[".symtab"]) if ".symtab" in by_name else []
    entries = []
    for name in (name.removeprefix(".text.") for name in by_name if name.startswith(".text.")):
        values = attributes.get(symbols.index(name), {}) if name in symbols else {}
        if _REGCOUNT not in values:
            raise ValueError(f"the image does not say how many registers {name} has")
        shared = by_name[f".nv.shared.{name}"].size if f".nv.shared.{name}" in by_name else 0
        if _RESERVED in by_name:
            shared = max(0, shared - _RESERVED_BYTES)
        entries.append(Machine(name, values[_REGCOUNT], values.get(_FRAME_SIZE, 0), shared))
    return entries


def _sections(image: bytes) -> Iterator[_Section]:
    (start,) = struct.unpack_from("<Q", image, 40)
    number, names_index = struct.unpack_from("<HH", image, 60)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", image, start + _SECTION_BYTES * index)
        for index in range(number)
    ]
    names_at = headers[names_index][4]
    for header in headers:
        yield _Section(_text(image, names_at + header[0]), header[4], header[5], header[6])


def _symbols(image: bytes, sections: list[_Section], table: _Section) -> list[str]:
    names_at = sections[table.link].offset
    places = range(table.offset, table.offset + table.size, _SYMBOL_BYTES)
    # A section's own symbol has no name; a search for it would find it before the kernel's.
    return [_text(image, names_at + struct.unpack_from("<I", image, place)[0]) for place in places]


def _attributes(image: bytes, info: _Section) -> dict[int, dict[int, int]]:
    """Returns {symbol: {attribute: value}}; attributes of other forms are skipped."""
    attributes: dict[int, dict[int, int]] = {}
    at, end = info.offset, info.offset + info.size
    while at + 4 <= end:
        form, attribute, size = struct.unpack_from("<BBH", image, at)
        at += 4
        if form != _SIZED:
            continue
        if size == 8:
            symbol, value = struct.unpack_from("<II", image, at)
            attributes.setdefault(symbol, {})[attribute] = value
        at += size
    return attributes


def _text(image: bytes, start: int) -> str:
    return image[start : image.index(b"\0", start)].decode()
