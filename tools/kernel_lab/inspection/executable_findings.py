"""What is found in a compiled function: its Pallas kernels, the memory it takes, and what is wrong with a step that should change its
pages in place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools.kernel_lab.inspection import executable, hlo
from tools.kernel_lab.inspection.executable import Kernel


@dataclass(frozen=True)
class Findings:
    """Of one `jax.stages.Compiled`."""

    kernels: tuple[Kernel, ...]  # the launches of Pallas kernels
    num_launches: (
        # of all kernels, XLA's fusions among them, but for those of cuBLAS and its like; a loop's
        # count once
        int
    )
    calls: Mapping[str, int]  # how often each Pallas kernel is called
    aliased_bytes: int  # of the results that lie where arguments lay
    temporary_bytes: int
    computations: Mapping[str, hlo.Computation]

    @property
    def spilled_bytes(self) -> int:
        """Of a thread, of the Pallas kernel with the most."""
        return max((kernel.machine.stack_bytes for kernel in self.kernels), default=0)

    def problems(self, *, pages_bytes: int, array_bytes: int) -> list[str]:
        """What keeps the function from changing its pages in place, with kernels that hold their sums in registers; empty if nothing.

        pages_bytes: of all pages. array_bytes: of one layer's keys. The pool should be so large that nothing else has that size.
        """
        found = [
            f"{kernel.name} spills {kernel.machine.stack_bytes} bytes of a thread ({kernel.machine.registers} registers)"
            for kernel in self.kernels
            if kernel.machine.stack_bytes
        ]
        if self.aliased_bytes != pages_bytes:
            found.append(
                f"{self.aliased_bytes} bytes are aliased, and the pages have {pages_bytes}"
            )
        if self.temporary_bytes >= array_bytes:
            found.append(
                f"{self.temporary_bytes} bytes of temporary memory hold a layer's keys of {array_bytes}"
            )
        return found + [
            f"{one.name} makes {one.num_bytes} bytes ({one.how})"
            for one in hlo.made(self.computations, array_bytes)
        ]


def inspect(compiled: Any) -> Findings:
    """Raises ValueError if the executable has no code for a Pallas kernel that its program calls."""
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
    """The name that a kernel was given: XLA numbers those that share one, Mosaic adds its own."""
    return re.sub(r"(__\d+|_mosaic_gpu_kernel)$", "", name)
