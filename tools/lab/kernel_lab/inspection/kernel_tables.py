"""Makes the table of registers, spills, shared memory and instructions of the kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax

from tools.lab.kernel_lab.inspection import sass
from tools.lab.kernel_lab.inspection.compiled_cases import Case
from tools.lab.kernel_lab.inspection.deviceless import compile_for
from tools.lab.kernel_lab.inspection.executable import Kernel
from tools.lab.kernel_lab.inspection.executable_findings import inspect, stem

INSTRUCTIONS = {  # a column each: the instructions of that name with these modifiers
    "wgmma": (("HGMMA",), ("IGMMA",), ("QGMMA",)),
    "mma": (("HMMA",), ("IMMA",), ("QMMA",)),
    "16-byte async copies": (("LDGSTS", "128"),),
    "TMA loads": (("UTMALDG",),),
}
COLUMNS = ("kernel", "shape", "registers", "spilled bytes", "shared KiB", *INSTRUCTIONS)


@dataclass(frozen=True)
class Row:
    """A kernel of a case; bytes and registers are per thread, shared memory per program."""

    kernel: str
    shape: str
    registers: int
    spilled_bytes: int
    shared_bytes: int | None
    # The counts in the order of `INSTRUCTIONS`; None without a disassembler.
    instructions: tuple[int, ...] | None

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of the row."""
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
    """Returns a row for each Pallas kernel that the case compiles to.

    Raises:
        NotImplementedError: The backend does not take the call.
    """
    findings = inspect(compile_for(case.function, *case.arguments, gpu=gpu))
    return list(dict.fromkeys(_row(kernel, case) for kernel in findings.kernels))


def _row(kernel: Kernel, case: Case) -> Row:
    counts = None
    if sass.disassembler() is not None:
        opcodes = sass.opcodes(kernel.image)
        counts = tuple(
            sum(sass.count(opcodes, *each) for each in expected)
            for expected in INSTRUCTIONS.values()
        )
    machine = kernel.machine
    name = f"{stem(kernel.name)} ({case.backend})"
    return Row(
        name, case.shape, machine.registers, machine.stack_bytes, kernel.shared_bytes, counts
    )


def markdown(rows: Iterable[Row], refusals: Sequence[str], *, gpu: str) -> str:
    """Returns the table in Markdown.

    The line above it names the GPU and the version of JAX; the lines below it list the calls that
    no kernel takes.
    """
    lines = [f"Compiled for {gpu.upper()} by jax {jax.__version__}. {_NOTE}", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    if refusals:
        lines += ["", "Not taken:", "", *(f"- {refusal}" for refusal in refusals)]
    return "\n".join(lines)


_NOTE = (
    "Registers and spilled bytes are of a thread, shared memory is of a program, instructions are counted once for each place in "
    "the code, not as often as they run."
)
