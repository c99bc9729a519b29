"""The table of what the compiler makes of the kernels: registers, spills, shared memory and the instructions that matter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax

from tools.kernel_lab.inspection import sass
from tools.kernel_lab.inspection.compiled_cases import Case
from tools.kernel_lab.inspection.deviceless import compile_for
from tools.kernel_lab.inspection.executable import Kernel
from tools.kernel_lab.inspection.executable_findings import inspect, stem

INSTRUCTIONS = {  # a column each: instructions of that name with these modifiers
    "wgmma": (("HGMMA",), ("IGMMA",), ("QGMMA",)),
    "mma": (("HMMA",), ("IMMA",), ("QMMA",)),
    "16-byte async copies": (("LDGSTS", "128"),),
    "TMA loads": (("UTMALDG",),),
}
COLUMNS = ("kernel", "shape", "registers", "spilled bytes", "shared KiB", *INSTRUCTIONS)


@dataclass(frozen=True)
class Row:
    """A kernel of a case. Bytes and registers are of one thread, shared memory of one program."""

    kernel: str
    shape: str
    registers: int
    spilled_bytes: int
    shared_bytes: int | None
    # in the order of `INSTRUCTIONS`; None without a disassembler
    instructions: tuple[int, ...] | None

    def cells(self) -> tuple[str, ...]:
        shared = "?" if self.shared_bytes is None else f"{self.shared_bytes / 1024:.1f}"
        counts = (
            ["?"] * len(INSTRUCTIONS) if self.instructions is None else map(str, self.instructions)
        )
        return (
            self.kernel,
            self.shape,
            str(self.registers),
            str(self.spilled_bytes),
            shared,
            *counts,
        )


def rows(case: Case, *, gpu: str = "h200") -> list[Row]:
    """A row for each Pallas kernel in what the case compiles to. Raises NotImplementedError where the backend does not take the call."""
    findings = inspect(compile_for(case.function, *case.arguments, gpu=gpu))
    return list(dict.fromkeys(_row(kernel, case) for kernel in findings.kernels))


def _row(kernel: Kernel, case: Case) -> Row:
    counts = None
    if sass.disassembler() is not None:
        opcodes = sass.opcodes(kernel.image)
        counts = tuple(
            sum(sass.count(opcodes, *one) for one in wanted) for wanted in INSTRUCTIONS.values()
        )
    machine = kernel.machine
    name = f"{stem(kernel.name)} ({case.backend})"
    return Row(
        name, case.shape, machine.registers, machine.stack_bytes, kernel.shared_bytes, counts
    )


def markdown(found: Iterable[Row], refusals: Sequence[str], *, gpu: str) -> str:
    """The table, with a line above that says what it was made with, and below which calls no kernel takes."""
    lines = [f"Compiled for {gpu.upper()} by jax {jax.__version__}. {_NOTE}", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in found]
    if refusals:
        lines += ["", "Not taken:", "", *(f"- {refusal}" for refusal in refusals)]
    return "\n".join(lines)


_NOTE = (
    "Registers and spilled bytes are of a thread, shared memory is of a program, instructions are counted as they stand in the code, "
    "not as often as they run."
)
