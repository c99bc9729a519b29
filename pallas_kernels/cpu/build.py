"""How the kernels for CPUs are compiled. It needs no JAX but for headers, so that a wheel can be built with them: see `hatch_build.py`.

No -ffast-math, and no contraction of products and sums: a result does not depend on what a compiler prefers.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-pthread",
    "-w",
)
# By instruction set, the best first: what /proc/cpuinfo must have, and the compiler's flags.
X86 = {
    "avx512": (
        {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
        ("-march=skylake-avx512", "-mprefer-vector-width=512"),
    ),
    "avx2": ({"avx2", "fma"}, ("-march=haswell",)),
}
ARM = {"neon": ()}
_DIGEST_BYTES = hashlib.sha256().digest_size


def compiler() -> list[str]:
    """Its command: $CXX may have options. Raises RuntimeError without one."""
    if given := os.environ.get("CXX"):
        return shlex.split(given)
    found = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if found is None:
        raise RuntimeError(
            "it is compiled on this machine, and there is no C++ compiler (g++, clang++, c++ or $CXX)"
        )
    return [found]


def options(name: str, flags: Sequence[str], include: str) -> tuple[str, ...]:
    """Returns the compiler's options for the instruction set `name`. include: the directory of XLA's headers, `jax.ffi.include_dir()`."""
    return (*FLAGS, *flags, f"-DJAXPAGE_ISA={name}", f"-I{include}")


def build(path: Path, sources: Path, chosen: Sequence[str]) -> None:
    """Compiles all .cc files, each in a process of its own, and links them into `path`. Raises RuntimeError with the compiler's words."""
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        units = sorted(sources.glob("*.cc"))
        objects = [str(Path(temporary) / f"{unit.stem}.o") for unit in units]
        made = Path(temporary) / path.name
        _run(
            [
                [*compiler(), *chosen, "-c", str(unit), "-o", each]
                for unit, each in zip(units, objects, strict=True)
            ]
        )
        _run([[*compiler(), *chosen, *objects, "-o", str(made)]])
        with made.open("ab") as file:  # after what a loader reads; see `is_whole`
            file.write(hashlib.sha256(made.read_bytes()).digest())
        made.replace(path)  # another process may have made the same


def is_whole(path: Path) -> bool:
    """Returns whether a library is as it was built.

    A loader maps the file into memory, where a part that is missing or changed ends the process.
    """
    content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _run(commands: Sequence[Sequence[str]]) -> None:
    """Raises RuntimeError with the line in which a command tells of an error, after all have ended."""
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    said = [process.communicate()[1] for process in running]
    for command, process, errors in zip(commands, running, said, strict=True):
        if process.returncode:
            lines = errors.strip().splitlines() or [f"exit status {process.returncode}"]
            reason = next((line for line in lines if "error" in line), lines[-1])
            raise RuntimeError(f"{command[0]} failed: {reason[:500]}")
