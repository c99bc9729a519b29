"""Loads the kernels for CPUs as a shared library.

It is the wheel's own, or is compiled for this machine once and kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import jax

from pallas_kernels.cpu.build import SOURCES, build, instruction_set, is_whole, options

logger = logging.getLogger(__name__)
_LOADING = threading.Lock()

NONE, DOT, TILES = range(3)  # see `Library.instructions`
# A wheel has this directory if the kernels were compiled when it was built (`hatch_build.py`).
PREBUILT = Path(__file__).parent / "prebuilt"
_FORM = "with a digest"  # part of a file's name, so that files of another form are not read
FUNCTIONS = (
    "jaxpage_attend",
    "jaxpage_write_and_attend",
    "jaxpage_attend_bidirectional",
    "jaxpage_multiply_packed",
    "jaxpage_multiply_coded",
    "jaxpage_run_fusion",
    "jaxpage_gate",
    "jaxpage_rms_norm",
    "jaxpage_add_and_norm",
    "jaxpage_layer_norm",
    "jaxpage_rotate",
    "jaxpage_split_and_rotate",
)


class Library(NamedTuple):
    """Describes the library that was loaded.

    Attributes:
        instruction_set: The name of the instruction set; empty if there are no kernels.
        reason: The reason why there are no kernels; None if there are.
        instructions: The instructions that multiply words of bfloat16 and of int8 (the keys): NONE,
            DOT for those of AVX-512, TILES for AMX. A sum of bfloat16 has other bits with each.
    """

    instruction_set: str
    reason: str | None = None
    instructions: Mapping[str, int] = MappingProxyType({})


def load() -> Library:
    """Registers the functions with XLA, once for the process.

    A library that cannot be compiled or loaded raises nothing here: see `Library.reason`.
    """
    with _LOADING:  # because several threads trace functions
        return _load()


@functools.cache
def _load() -> Library:
    instructions = instruction_set()
    if instructions is None:
        return Library("", f"this processor ({platform.machine()}) has neither AVX2 nor NEON")
    name, flags = instructions
    if (prebuilt := PREBUILT / f"{name}.so").exists():
        library = _register(name, lambda: _whole(prebuilt))
        if library.reason is None:
            return library
        logger.warning("%s cannot be used: %s", prebuilt, library.reason)
    return _register(name, lambda: compile_library(name, flags))


def _whole(path: Path) -> Path:
    if not is_whole(path):
        raise RuntimeError("the file is damaged")
    return path


def _register(name: str, find: Callable[[], Path]) -> Library:
    """Registers the functions with XLA; the result has the reason if that fails.

    XLA refuses functions that were built for another version of its interface.
    """
    try:
        library = ctypes.cdll.LoadLibrary(str(find()))
        for function in FUNCTIONS:
            jax.ffi.register_ffi_target(
                function, jax.ffi.pycapsule(getattr(library, function)), platform="cpu"
            )
        best = {
            dtype: library.jaxpage_instructions(dtype == "int8") for dtype in ("bfloat16", "int8")
        }
    except (OSError, AttributeError, RuntimeError) as error:
        return Library("", str(error))
    return Library(name, None, MappingProxyType(best))


def compile_library(name: str, flags: Sequence[str]) -> Path:
    """Returns the library for an instruction set, which is compiled unless the cache has it.

    Raises:
        RuntimeError: It could not be compiled.
    """
    chosen = options(name, flags, jax.ffi.include_dir())
    key = hashlib.sha256(repr((chosen, jax.__version__, _FORM)).encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.read_bytes())
    path = _cache() / f"{name}-{key.hexdigest()[:16]}.so"
    if path.exists() and is_whole(path):
        return path
    with _alone_in(path.parent):
        # Another process may have built it while this one waited.
        if (is_there := path.exists()) and is_whole(path):
            return path
        if is_there:
            logger.warning("%s is damaged", path)
        logger.warning(
            "Compiling the kernels for CPUs (%s), once: about 10 s on two free cores", name
        )
        build(path, SOURCES, chosen)
    return path


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Waits until no other process compiles there, which may be the same library.

    Where the file system has no locks, processes compile beside each other.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # and the lock with it


def make_private(directory: Path) -> None:
    """Makes a directory for code that only this user may own and write.

    A directory that is already private is not changed: it may be on a read-only file system.

    Raises:
        OSError: The directory cannot be made, or belongs to another user.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{directory} belongs to another user")
    if status.st_mode & 0o077:
        directory.chmod(0o700)


def _cache() -> Path:
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = Path(os.environ.get("JAXPAGE_CACHE_DIR") or user_cache / "jaxpage") / "kernels"
    make_private(directory)
    return directory
