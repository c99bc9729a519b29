"""Compiles for TPUs that are not there, by their own compiler, which is in the package libtpu."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.compat import describe_tpu, libtpu_reason, without_compile_cache
from tools.lab.kernel_lab.inspection import hlo
from tools.lab.kernel_lab.inspection.executable_findings import page_problems

# The names of libtpu for the smallest topologies; only one device of each is used.
TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
# What a machine with a TPU knows of itself. Without them libtpu asks the network.
_SURROUNDINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # several processes may compile at once
}
# Operations by which a program asks or tells its host something, and the host's memory in layouts.
_OF_HOST = ("infeed", "outfeed", "send", "recv")
_HOST_MEMORY = "S(5)"


@dataclass(frozen=True)
class Findings:
    """Holds what one function that was compiled for a TPU contains.

    Attributes:
        calls: The number of calls of each Pallas kernel.
        argument_bytes: The bytes of the arguments, with the padding of their tiles.
        aliased_bytes: The bytes of the results that use the memory of arguments.
        temporary_bytes: The bytes of temporary memory.
        accessed_bytes: The bytes that the compiler counts as read and written.
        of_host: The operations that concern the host.
        computations: The computations of its HLO.
    """

    calls: Mapping[str, int]
    argument_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    accessed_bytes: int
    of_host: tuple[str, ...]
    computations: Mapping[str, hlo.Computation]

    def problems(self, *, pages_bytes: int, array_bytes: int) -> list[str]:
        """Returns what keeps a step from changing its pages in place and without its host.

        Args:
            pages_bytes: The bytes of all pages.
            array_bytes: The bytes of the largest array of pages.
        """
        problems = page_problems(
            self.computations,
            self.aliased_bytes,
            self.temporary_bytes,
            pages_bytes=pages_bytes,
            array_bytes=array_bytes,
        )
        return problems + [f"{name} concerns the host" for name in self.of_host]


def unavailable() -> str | None:
    """Returns why nothing can be compiled here, with the command that helps; None if it can."""
    return libtpu_reason() or None


def compile_for_tpu(function: Any, *arguments: Any, tpu: str = "v5e") -> Any:
    """Compiles a jitted function for one TPU of that name.

    Args:
        function: The jitted function.
        *arguments: Its arguments; arrays may be anything with a shape and a type.
        tpu: A name of `TPUS`.

    Returns:
        The `jax.stages.Compiled`.

    Raises:
        RuntimeError: libtpu is not installed.
    """
    if reason := unavailable():
        raise RuntimeError(f"nothing can be compiled for {tpu}: {reason}")
    os.environ.update(_SURROUNDINGS)
    device = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[tpu]).devices[0]
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())

    def place(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    with describe_tpu(device):
        lowered = function.lower(*jax.tree.map(place, arguments))
        with without_compile_cache():
            return lowered.compile()


def inspect_for_tpu(compiled: Any) -> Findings:
    """Reads the kernels, the memory and the dealings with the host of a compiled function."""
    text = compiled.as_text()
    computations = hlo.computations(text)
    memory = compiled.memory_analysis()
    items = [item for each in computations.values() for item in each.instructions]
    of_host = [
        f"{item.name} ({item.opcode})"
        for item in items
        if item.opcode.partition("-")[0] in _OF_HOST
    ]
    if _HOST_MEMORY in text:
        of_host.append(f"an array in the host's memory, {_HOST_MEMORY},")
    return Findings(
        hlo.kernel_calls(computations),
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        int(compiled.cost_analysis()["bytes accessed"]),
        tuple(of_host),
        computations,
    )
