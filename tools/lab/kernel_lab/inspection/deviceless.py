"""Compiles jitted functions for a GPU that is not present.

XLA, Triton and Mosaic run as for a real GPU, down to the machine code of its chip. This needs JAX's
CUDA plugin of JAX's own version, and neither a GPU nor CUDA. The result is what a GPU would run,
with two limits: XLA did not measure which kernel is best for a matrix product, and nothing shows
that such an executable loads on a real device.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.compat import describe_gpu, without_compile_cache

# Each has a .textproto next to this file.
GPUS = ("h200", "h100", "a100", "rtx3090", "rtx4090", "rtx5090", "b200", "t4")
INSTALL = 'pip install "jax[cuda13-local]=={}" (or jaxpage with its extra "inspect")'
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def unavailable() -> str | None:
    """Returns why nothing can be compiled here, with the command that helps; None if it can."""
    versions = {name: version for name in _PLUGINS if (version := _version(name)) is not None}
    if not versions:
        return f"JAX's CUDA plugin is not installed: {INSTALL.format(jax.__version__)}"
    if jax.__version__ not in versions.values():
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        return f"JAX is {jax.__version__}, but its CUDA plugin is another version ({listed}): {INSTALL.format(jax.__version__)}"
    return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def describe_mesh(gpu: str = "h200") -> Mesh:
    """Returns a mesh of one GPU of that name that is not present.

    Raises:
        ValueError: The name is none of `GPUS`.
        RuntimeError: The plugin is absent or another version; the text says what to install.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, not {gpu!r}")
    if reason := unavailable():
        raise RuntimeError(f"nothing can be compiled for {gpu}: {reason}")
    # The plugin looks for CUDA's libraries when it is loaded, and gives up where there are none.
    # Compiling needs none of them.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    config = (Path(__file__).parent / f"{gpu}.textproto").read_text(encoding="utf-8")
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=gpu, topology="1x1x1", target_config=config
    )
    return Mesh(np.array(topology.devices[:1]), ("x",))


def compile_for(
    function: Any,
    *arguments: Any,
    gpu: str = "h200",
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Any:
    """Compiles a jitted function for one GPU of that name.

    Args:
        function: The jitted function.
        *arguments: Its arguments; arrays may be anything with a shape and a type.
        gpu: The name of the GPU.
        options: Options of the compiler.
        **keywords: Its keyword arguments.

    Returns:
        The `jax.stages.Compiled`.

    Raises:
        ValueError: The name is none of `GPUS`.
        RuntimeError: The plugin is absent or another version.
    """
    mesh = describe_mesh(gpu)
    device = mesh.devices.flat[0]
    sharding = NamedSharding(mesh, PartitionSpec())

    def place(leaf: Any) -> Any:
        return (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            if hasattr(leaf, "shape")
            else leaf
        )

    arguments, keywords = jax.tree.map(place, (arguments, keywords))
    with describe_gpu(device.device_kind, device.core_count, device.compute_capability):
        lowered = function.lower(*arguments, **keywords)
        # An executable that is compiled for no device can be written to the cache, but not read
        # back.
        with without_compile_cache():
            as_by_default = {"xla_backend_optimization_level": 3}  # independent of XLA_FLAGS
            return lowered.compile(as_by_default | dict(options or {}))


def compile_with_thunks(
    function: Any, *arguments: Any, options: Mapping[str, Any] | None = None, **keywords: Any
) -> tuple[Any, str]:
    """Returns the result of `compile_for`, and XLA's list of thunks for `thunks.on_host`."""
    with tempfile.TemporaryDirectory() as directory:
        compiled = compile_for(
            function, *arguments, options={**(options or {}), "xla_dump_to": directory}, **keywords
        )
        # The last file is the list after all passes that changed it.
        *_, last = sorted(Path(directory).glob("*.thunk_sequence*.txt"))
        return compiled, last.read_text(encoding="utf-8")
