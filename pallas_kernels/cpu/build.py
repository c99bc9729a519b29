"""Compiles the kernels for CPUs to one shared library: `python -m pallas_kernels.cpu.build DIRECTORY`. The package's build calls it (hatch_build.py).

No -ffast-math, and no contraction of products and sums but where the code says so: a result may not depend on the compiler's mood.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = "_kernels.so"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-ffp-contract=off", "-Wall")
X86 = {
    "avx512": ("-march=skylake-avx512", "-mprefer-vector-width=512"),
    "avx2": ("-march=haswell",),
}


def instruction_sets() -> dict[str, Sequence[str]]:
    """The flags of each that a library for this machine has."""
    return {**X86} if platform.machine() in ("x86_64", "AMD64") else {"base": ()}


def build(destination: Path, include: Path, compiler: str | None = None, extra: Sequence[str] = ()) -> Path:
    """The library, in that directory. include: of XLA's headers (`jax.ffi.include_dir()`). Raises RuntimeError with the compiler's text."""
    compiler = compiler or os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (g++, clang++, c++, or $CXX)")
    common = (compiler, *FLAGS, *extra, f"-I{include}")
    with tempfile.TemporaryDirectory() as temporary:
        objects = {"ffi": ("ffi.cc", ())}
        for name, flags in instruction_sets().items():
            objects[name] = ("attention_isa.cc", (*flags, f"-DJAXPAGE_ISA={name}"))
        commands = [
            (*common, *flags, "-c", str(SOURCES / source), "-o", f"{temporary}/{name}.o")
            for name, (source, flags) in objects.items()
        ]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_run, commands))
        destination.mkdir(parents=True, exist_ok=True)
        linked = Path(temporary) / LIBRARY
        _run((*common, "-shared", *(f"{temporary}/{name}.o" for name in objects), "-o", str(linked), "-lpthread"))
        shutil.copyfile(linked, destination / LIBRARY)
    return destination / LIBRARY


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")


if __name__ == "__main__":
    import jax

    print(build(Path(sys.argv[1]), Path(jax.ffi.include_dir())))
