"""Checks the kernels for CPUs with every instruction set that can be run here.

    python tools/lab/check_instructions.py

For each instruction set a program is built of the kernels and of `instruction_cases.cc`, which
calls them without XLA. Rows computed alone are compared with rows among others, and results of
dot products and tiles of bfloat16 with those without them. Results that have the same bits with all
instructions are compared between the programs: the tests compare one of them with other libraries.

A program needs no library, so that other machines and emulators run it:

    python tools/lab/check_instructions.py --programs directory
    directory/avx512 > output                  # on a machine with AVX-512, or with AMX
    python tools/lab/check_instructions.py --outputs output
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from pallas_kernels.cpu import build

CASES = Path(__file__).with_name("instruction_cases.cc")
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


class Result(NamedTuple):
    """Holds what a program says of a case: the verdict is "ok", or what is wrong."""

    hash: str
    error: float
    verdict: str


Output = dict[str, Result]


class Target(NamedTuple):
    """Describes an instruction set.

    Attributes:
        name: The name that `build` has for it.
        flags: The compiler's flags.
        compiler: The compiler's command; empty if there is none.
        before: The command that runs a program; empty if the machine does.
        reason: The reason why its program cannot be run here; None if it can.
    """

    name: str
    flags: Sequence[str]
    compiler: Sequence[str]
    before: Sequence[str]
    reason: str | None


def targets() -> Iterator[Target]:
    """Yields all instruction sets: those of this machine's kind first."""
    sets, has = build.instruction_sets(), build.processor_flags()
    for name, (needed, flags) in sets.items():
        lacking = " ".join(sorted(needed - has))
        reason = f"this processor lacks {lacking}" if lacking else None
        yield Target(name, flags, build.compiler(), (), reason)
    if sets is build.X86:
        lacking = " ".join(tool for tool in (CROSS_COMPILER, EMULATOR) if not shutil.which(tool))
        reason = f"there is no {lacking}" if lacking else None
        compiler = [CROSS_COMPILER] if shutil.which(CROSS_COMPILER) else []
        for name, (_, flags) in build.ARM.items():
            yield Target(name, flags, compiler, [EMULATOR], reason)


def build_program(target: Target, directory: Path, sources: Path = build.SOURCES) -> Path:
    """Builds the program of an instruction set.

    Raises:
        RuntimeError: The compiler failed.
    """
    path = directory / target.name
    chosen = build.options(target.name, target.flags, jax.ffi.include_dir())
    units = [*map(str, sorted(sources.glob("*.cc"))), str(CASES)]
    linked = [*(flag for flag in chosen if flag != "-shared"), f"-I{sources}", "-static"]
    command = [*target.compiler, *linked, *units, "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed for {target.name}: {done.stderr.strip()[-500:]}")
    return path


def run_program(command: Sequence[str | Path]) -> Output:
    """Returns the output of a program.

    Raises:
        RuntimeError: The program ended before its last case.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{command[-1]} ended with {done.returncode}: {done.stderr[-500:]}")
    return parse(done.stdout)


def parse(text: str) -> Output:
    """Returns the results in the lines of an output; other lines, as of a console, are left out.

    Raises:
        ValueError: The last line is missing.
    """
    output: Output = {}
    for line in text.replace("\r", "").splitlines():
        name, *fields = line.split("\t")
        if len(fields) != 3:
            continue
        digest, error, verdict = fields
        if name in output and output[name].hash != digest:
            verdict = "other bits with other instructions"
        if name not in output or output[name].verdict == "ok":
            output[name] = Result(digest, float(error), verdict)
    if "; wrong: " not in text:
        raise ValueError(f"the output ends after {len(output)} cases: its last line is missing")
    return output


def mistakes(outputs: Mapping[str, Output]) -> Iterator[str]:
    """Yields what is wrong in the outputs of all programs, by their names."""
    first: dict[str, tuple[str, str]] = {}
    for program, output in outputs.items():
        for name, result in output.items():
            if result.verdict != "ok":
                yield f"{program}: {name}: {result.verdict} (error {result.error:g})"
            before, digest = first.setdefault(name, (program, result.hash))
            if digest != result.hash:
                yield f"{program}: {name}: other bits than {before}"


def main(argv: Sequence[str] | None = None, sources: Path = build.SOURCES) -> int:
    """Builds, runs and compares. Returns 1 if anything is wrong."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument(
        "--programs",
        type=Path,
        metavar="DIRECTORY",
        help="keep the programs there, those that this machine cannot run too",
    )
    parser.add_argument(
        "--outputs",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="outputs of programs that ran elsewhere, to compare with",
    )
    parser.add_argument("--only", metavar="SET", help="one instruction set, such as avx2")
    arguments = parser.parse_args(argv)
    outputs = {}
    for path in arguments.outputs:
        try:
            outputs[str(path)] = parse(path.read_text(errors="replace"))
        except (OSError, ValueError) as error:
            parser.error(f"--outputs {path}: {error}")
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.programs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for target in targets():
            if arguments.only not in (None, target.name):
                continue
            if target.reason is None or (arguments.programs and target.compiler):
                program = build_program(target, directory, sources)
            if target.reason is None:
                outputs[target.name] = run_program([*target.before, program])
            else:
                print(f"{target.name}: not run, because {target.reason}")
    for name, output in outputs.items():
        print(f"{name}: {len(output)} results")
    lines = list(mistakes(outputs))
    print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{len(lines)} mistakes ({platform.machine()})")
    return int(bool(lines) or not outputs)


if __name__ == "__main__":
    sys.exit(main())
