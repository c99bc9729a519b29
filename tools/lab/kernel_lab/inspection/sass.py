"""Counts the instructions of a kernel, where NVIDIA's disassembler is installed.

It comes with the CUDA toolkit and in the wheel of `triton`.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE
)


@functools.cache
def disassembler() -> str | None:
    """Returns the path of `nvdisasm`, or None."""
    if program := shutil.which("nvdisasm"):
        return program
    try:
        triton = importlib.util.find_spec("triton")
    except (ImportError, ValueError):
        return None
    for directory in (triton.submodule_search_locations or []) if triton else []:
        path = Path(directory) / "backends" / "nvidia" / "bin" / "nvdisasm"
        if path.is_file():
            return str(path)
    return None


@functools.lru_cache(maxsize=256)
def opcodes(image: bytes) -> Counter[str]:
    """Counts each instruction in an image's code by its full name (LDGSTS.E.BYPASS.128).

    Raises:
        RuntimeError: nvdisasm is not installed.
    """
    program = disassembler()
    if program is None:
        raise RuntimeError(
            "nvdisasm is not found: it comes with CUDA's toolkit and in the wheel of triton"
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        text = subprocess.run(
            [program, "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    return parse(text)


def parse(text: str) -> Counter[str]:
    """Counts the instructions in the disassembler's text."""
    return Counter(_INSTRUCTION.findall(text))


def count(instructions: Counter[str], name: str, *modifiers: str) -> int:
    """Returns how many instructions are called `name` and have all of these modifiers."""
    return sum(
        number
        for opcode, number in instructions.items()
        if opcode.split(".")[0] == name and set(modifiers) <= set(opcode.split(".")[1:])
    )
