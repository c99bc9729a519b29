"""Reports what a compiled function holds, and why a step fails to change its pages in place.

It finds the Pallas kernels and the memory that the function takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools.lab.kernel_lab.inspection import executable, hlo
from tools.lab.kernel_lab.inspection.executable import Kernel


@dataclass(frozen=True)
class Findings:
    """Holds what one `jax.stages.Compiled` contains."""

    kernels: tuple[Kernel, ...]  # the launches of Pallas kernels
    num_launches: (
        # Launches of all kernels: XLA's fusions are counted, cuBLAS and its like are not; a loop's
        # launches count once.
        int
    )
    calls: Mapping[str, int]  # the number of calls of each Pallas kernel
    aliased_bytes: int  # bytes of the results that use the memory of arguments
    temporary_bytes: int
    computations: Mapping[str, hlo.Computation]

    @property
    def spilled_bytes(self) -> int:
        """Returns the spilled bytes per thread of the Pallas kernel with the most."""
        return max((kernel.machine.stack_bytes for kernel in self.kernels), default=0)

    def problems(self, *, pages_bytes: int, array_bytes: int) -> list[str]:
        """Returns what keeps the function from changing its pages in place; empty if nothing.

        Spilled registers count as a problem too. The pool should be so large that nothing else has
        the size of a layer's keys.

        Args:
            pages_bytes: The bytes of all pages.
            array_bytes: The bytes of one layer's keys.
        """
        problems = [
            f"{kernel.name} spills {kernel.machine.stack_bytes} bytes of a thread ({kernel.machine.registers} registers)"
            for kernel in self.kernels
            if kernel.machine.stack_bytes
        ]
        return problems + page_problems(
            self.computations,
            self.aliased_bytes,
            self.temporary_bytes,
            pages_bytes=pages_bytes,
            array_bytes=array_bytes,
        )


def page_problems(
    computations: Mapping[str, hlo.Computation],
    aliased_bytes: int,
    temporary_bytes: int,
    *,
    pages_bytes: int,
    array_bytes: int,
) -> list[str]:
    """Returns what keeps a function from changing its pages in place; empty if nothing.

    Args:
        computations: The computations of its HLO.
        aliased_bytes: The bytes of the results that use the memory of arguments.
        temporary_bytes: The bytes of temporary memory.
        pages_bytes: The bytes of all pages.
        array_bytes: The bytes of the largest array of pages.
    """
    findings = []
    if aliased_bytes != pages_bytes:
        findings.append(f"{aliased_bytes} bytes are aliased, and the pages have {pages_bytes}")
    if temporary_bytes >= array_bytes:
        findings.append(
            f"{temporary_bytes} bytes of temporary memory hold a layer's keys of {array_bytes}"
        )
    return findings + [
        f"{each.name} makes {each.num_bytes} bytes ({each.how})"
        for each in hlo.arrays_made(computations, array_bytes)
    ]


def inspect(compiled: Any) -> Findings:
    """Reads the kernels, calls and memory of a compiled function.

    Raises:
        ValueError: The executable has no code for a Pallas kernel that its program calls.
    """
    computations = hlo.computations(compiled.as_text())
    calls = hlo.kernel_calls(computations)
    launches = executable.kernels(compiled.runtime_executable().serialize())
    ours = tuple(kernel for kernel in launches if stem(kernel.name) in calls)
    if missing := set(calls) - {stem(kernel.name) for kernel in ours}:
        raise ValueError(f"no code is found of {', '.join(sorted(missing))}")
    memory = compiled.memory_analysis()
    return Findings(
        ours,
        len(launches),
        calls,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        computations,
    )


def stem(name: str) -> str:
    """Returns the name that a kernel was given, without what XLA and Mosaic add to it."""
    return re.sub(r"(__\d+|_mosaic_gpu_kernel)$", "", name)
