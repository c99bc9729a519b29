"""The kernels for CPUs as a shared library: compiled for this machine when they are first asked for, and kept in the user's cache.

No -ffast-math, and no contraction of products and sums: a result does not depend on what a compiler prefers.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

logger = logging.getLogger(__name__)
_LOADING = threading.Lock()

SOURCES = Path(__file__).parent / "src"
FUNCTIONS = ("jaxpage_attend", "jaxpage_write_and_attend", "jaxpage_multiply")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=off", "-pthread", "-Wall")
# By instruction set, the best first: what /proc/cpuinfo must have, and the compiler's flags.
X86 = {
    "avx512": ({"avx512f", "avx512bw", "avx512dq", "avx512vl"}, ("-march=skylake-avx512", "-mprefer-vector-width=512")),
    "avx2": ({"avx2", "fma"}, ("-march=haswell",)),
}


class Library(NamedTuple):
    """reason: why there are no kernels; None: there are."""

    instruction_set: str
    reason: str | None = None


def load() -> Library:
    """Registers the functions with XLA. What cannot be compiled or loaded is no error here: see `Library.reason`."""
    with _LOADING:  # functions are traced by several threads
        return _load()


@functools.cache
def _load() -> Library:
    found = instruction_set()
    if found is None:
        return Library("", f"this processor ({platform.machine()}) has neither AVX2 nor NEON")
    name, flags = found
    try:
        path = compiled(name, flags)
        library = ctypes.cdll.LoadLibrary(str(path))
        for function in FUNCTIONS:
            jax.ffi.register_ffi_target(function, jax.ffi.pycapsule(getattr(library, function)), platform="cpu")
    except (OSError, AttributeError, RuntimeError) as error:
        return Library("", str(error))
    return Library(name)


def instruction_set() -> tuple[str, Sequence[str]] | None:
    """The best one of this machine, and the compiler's flags for it."""
    if platform.machine() in ("aarch64", "arm64"):
        return "neon", ()
    try:
        has = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    except OSError:
        return None
    return next(((name, flags) for name, (needed, flags) in X86.items() if needed <= has), None)


def compiled(name: str, flags: Sequence[str], *, extra: Sequence[str] = ()) -> Path:
    """The library for this instruction set; compiled, unless the cache has it. Raises RuntimeError with the reason."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("it is compiled on this machine, and there is no C++ compiler (g++, clang++, c++ or $CXX)")
    include = jax.ffi.include_dir()
    options = (*FLAGS, *flags, *extra, f"-DJAXPAGE_ISA={name}", f"-I{include}")
    sources = sorted(SOURCES.iterdir())
    key = hashlib.sha256(repr((compiler, options, jax.__version__)).encode())
    for source in sources:
        key.update(source.read_bytes())
    directory = _cache()
    path = directory / f"{name}-{key.hexdigest()[:16]}.so"
    if path.exists():
        return path
    logger.warning("Compiling the kernels for CPUs (%s), once; this takes up to a minute", name)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        made = Path(temporary) / path.name
        units = [source for source in sources if source.suffix == ".cc"]
        objects = [Path(temporary) / f"{unit.stem}.o" for unit in units]
        # One process for each file, all at once, and then one that links.
        _run(
            [[compiler, *options, "-c", str(unit), "-o", str(each)] for unit, each in zip(units, objects, strict=True)]
        )
        _run([[compiler, *options, *map(str, objects), "-o", str(made)]])
        os.replace(made, path)  # another process may have made the same
    return path


def _run(commands: Sequence[Sequence[str]]) -> None:
    """Raises RuntimeError with what a command said, after all have ended."""
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    said = [process.communicate()[1] for process in running]
    for command, process, errors in zip(commands, running, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"{command[0]} failed: {errors.strip()[-2000:]}")


def _cache() -> Path:
    """A directory of the user's own: what is in it is code."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = Path(os.environ.get("JAXPAGE_CACHE_DIR") or user_cache / "jaxpage") / "kernels"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if directory.stat().st_uid != os.geteuid():
        raise RuntimeError(f"{directory} belongs to another user")
    directory.chmod(0o700)
    return directory
