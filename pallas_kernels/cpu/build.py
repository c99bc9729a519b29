"""Compiles the kernels for CPUs.

It needs only JAX's headers, and no JAX, so that a wheel can be built with the kernels: see
`hatch_build.py`. There is no -ffast-math, and products and sums are not contracted, so that a
result does not depend on a compiler's preferences.
"""

from __future__ import annotations

import hashlib
import os
import platform
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
# For each instruction set, the best first: the needed flags of /proc/cpuinfo, and the compiler's.
X86: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "avx512": (
        {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
        ("-march=skylake-avx512", "-mprefer-vector-width=512"),
    ),
    "avx2": ({"avx2", "fma"}, ("-march=haswell",)),
}
ARM: dict[str, tuple[set[str], tuple[str, ...]]] = {"neon": (set(), ())}
_DIGEST_BYTES = hashlib.sha256().digest_size


def instruction_sets() -> dict[str, tuple[set[str], tuple[str, ...]]]:
    """Returns the instruction sets of this kind of machine, as `X86` and `ARM` have them."""
    return ARM if platform.machine() in ("aarch64", "arm64") else X86


def instruction_set() -> tuple[str, Sequence[str]] | None:
    """Returns the best instruction set of this machine, and the compiler's flags for it."""
    has = processor_flags()
    sets = instruction_sets().items()
    return next(((name, flags) for name, (needed, flags) in sets if needed <= has), None)


def processor_flags() -> set[str]:
    """Returns the instruction sets that /proc/cpuinfo names; none where there is no such file."""
    try:
        return set(
            Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
        )
    except OSError:
        return set()


def compiler() -> list[str]:
    """Returns the compiler's command; $CXX may have options.

    Raises:
        RuntimeError: There is no compiler.
    """
    if command := os.environ.get("CXX"):
        return shlex.split(command)
    path = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if path is None:
        raise RuntimeError(
            "it is compiled on this machine, and there is no C++ compiler (g++, clang++, c++ or "
            "$CXX)"
        )
    return [path]


def options(name: str, flags: Sequence[str], include: str) -> tuple[str, ...]:
    """Returns the compiler's options.

    Args:
        name: The instruction set.
        flags: The flags of the instruction set.
        include: The directory of XLA's headers, `jax.ffi.include_dir()`.
    """
    return (*FLAGS, *flags, f"-DJAXPAGE_ISA={name}", f"-I{include}")


def build(path: Path, sources: Path, chosen: Sequence[str]) -> None:
    """Compiles all .cc files, each in a process of its own, and links them into `path`.

    Raises:
        RuntimeError: A command failed; the message has the compiler's words.
    """
    # Beside the library, because a file is replaced at once on one file system only.
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
        # A loader ignores the digest at the end of the file; see `is_whole`.
        with made.open("ab") as file:
            file.write(hashlib.sha256(made.read_bytes()).digest())
        made.replace(path)  # atomic, because another process may build the same library


def is_whole(path: Path) -> bool:
    """Returns whether a library is as it was built.

    A loader maps the file into memory; if a part were missing or changed there, the process would
    end.
    """
    content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _run(commands: Sequence[Sequence[str]]) -> None:
    """Runs commands in parallel.

    Raises:
        RuntimeError: A command failed; the message has the line of its error. All have ended then.
    """
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    outputs = [process.communicate()[1] for process in running]
    for command, process, errors in zip(commands, running, outputs, strict=True):
        if process.returncode:
            lines = errors.strip().splitlines() or [f"exit status {process.returncode}"]
            reason = next((line for line in lines if "error" in line), lines[-1])
            raise RuntimeError(f"{command[0]} failed: {reason[:500]}")
