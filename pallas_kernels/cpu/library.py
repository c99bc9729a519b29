"""The shared library of the kernels for CPUs, as the package's build left it, and its functions as XLA finds them."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import jax

from pallas_kernels.cpu.build import LIBRARY

PATH = Path(__file__).parent / LIBRARY
FUNCTIONS = ("jaxpage_attend", "jaxpage_write_and_attend")


class Library(NamedTuple):
    instruction_set: str  # "": none that this processor has
    reason: str | None  # why there are no kernels


@functools.cache
def load(path: Path = PATH) -> Library:
    """Registers the functions with XLA. A library that is missing, damaged or for another processor is no error: see `reason`."""
    if not path.exists():
        return Library("", "it was not built: there was no C++ compiler when jaxpage was installed")
    try:
        library = ctypes.cdll.LoadLibrary(str(path))
        library.jaxpage_isa.restype = ctypes.c_char_p
        instruction_set = library.jaxpage_isa().decode()
        if not instruction_set:
            return Library("", "this processor has no AVX2")
        for name in FUNCTIONS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    except (OSError, AttributeError) as error:
        return Library("", f"its library cannot be loaded: {error}")
    return Library(instruction_set, None)
