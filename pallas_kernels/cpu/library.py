"""The kernels for CPUs as a shared library: that of the wheel, or compiled for this machine once and kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from pallas_kernels.cpu.build import ARM, SOURCES, X86, build, compiler, is_whole, options

logger = logging.getLogger(__name__)
_LOADING = threading.Lock()

PREBUILT = Path(__file__).parent / "prebuilt"  # of a wheel that was built with JAXPAGE_BUILD_KERNELS=1
FUNCTIONS = ("jaxpage_attend", "jaxpage_write_and_attend", "jaxpage_multiply")


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
    if (prebuilt := PREBUILT / f"{name}.so").exists():
        if (reason := _register(prebuilt)) is None:
            return Library(name)
        logger.warning("%s cannot be used: %s", prebuilt, reason)
    try:
        reason = _register(compiled(name, flags))
    except (OSError, RuntimeError) as error:
        reason = str(error)
    return Library("" if reason else name, reason)


def _register(path: Path) -> str | None:
    """With XLA, which refuses what was built for another version of its interface. Returns why not."""
    try:
        if not is_whole(path):
            return "the file is damaged"
        library = ctypes.cdll.LoadLibrary(str(path))
        for function in FUNCTIONS:
            jax.ffi.register_ffi_target(function, jax.ffi.pycapsule(getattr(library, function)), platform="cpu")
    except (OSError, AttributeError, RuntimeError) as error:
        return str(error)
    return None


def instruction_set() -> tuple[str, Sequence[str]] | None:
    """The best one of this machine, and the compiler's flags for it."""
    if platform.machine() in ("aarch64", "arm64"):
        return next(iter(ARM.items()))
    try:
        has = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    except OSError:
        return None
    return next(((name, flags) for name, (needed, flags) in X86.items() if needed <= has), None)


def compiled(name: str, flags: Sequence[str]) -> Path:
    """The library for this instruction set; compiled, unless the cache has it. Raises RuntimeError with the reason."""
    chosen = options(name, flags, jax.ffi.include_dir())
    key = hashlib.sha256(repr((compiler(), chosen, jax.__version__, is_whole.__name__)).encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.read_bytes())
    path = _cache() / f"{name}-{key.hexdigest()[:16]}.so"
    if path.exists() and not is_whole(path):
        logger.warning("%s is damaged", path)
        path.unlink(missing_ok=True)
    if not path.exists():
        logger.warning("Compiling the kernels for CPUs (%s), once; this takes up to a minute", name)
        build(path, SOURCES, chosen)
    return path


def _cache() -> Path:
    """A directory of the user's own: what is in it is code."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = Path(os.environ.get("JAXPAGE_CACHE_DIR") or user_cache / "jaxpage") / "kernels"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if directory.stat().st_uid != os.geteuid():
        raise RuntimeError(f"{directory} belongs to another user")
    directory.chmod(0o700)
    return directory
