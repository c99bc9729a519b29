"""What differs among the versions of JAX that are supported, in one place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax import sharding
from jax.experimental.pallas import mosaic_gpu

mg: Any = mosaic_gpu  # its names and their types differ among versions
config: Any = jax.config  # whose values have no types
MOSAIC_INTERPRETABLE = hasattr(mg, "InterpretGPUParams")  # from jax 0.11 on


def described_gpu(kind: str = "NVIDIA H200", num_cores: int = 132) -> contextlib.AbstractContextManager[Any]:
    """A context in which kernels lower for a GPU that is not there. Before jax 0.11 they take a Hopper for granted."""
    if jax.__version_info__ < (0, 11, 0):
        return contextlib.nullcontext()
    device = sharding.AbstractDevice(kind, num_cores, "gpu")
    mesh = sharding.AbstractMesh((1,), ("x",), (sharding.AxisType.Auto,), abstract_device=device)
    return sharding.use_abstract_mesh(mesh)


def mosaic_kernel(
    body: Callable[..., None],
    *,
    out_type: Any,
    grid: dict[str, int],
    thread_name: str,
    num_threads: int,
    interpret: bool,
) -> Callable[..., Any]:
    """A Mosaic GPU kernel of `num_threads` warpgroups, which find their place by `lax.axis_index` of a name. The last axis runs fastest.

    What a value's registers hold is written in the kernel (`layout=`) and not inferred: that is "lane" semantics, whose default
    differs among versions.
    """
    return mg.kernel(
        body,
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=num_threads,
        thread_name=thread_name,
        compiler_params=mg.CompilerParams(approx_math=True, lowering_semantics=mg.LoweringSemantics.Lane),
        interpret=mosaic_interpreter() if interpret else None,
    )


def mosaic_interpreter() -> Any:
    """Runs a Mosaic kernel on CPU: its threads, barriers and copies are simulated."""
    return mg.InterpretGPUParams()


def transposed(ref: Any) -> Any:
    """A matrix in shared memory, read with its axes swapped."""
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else mg.transpose_ref(ref, (1, 0))


def loaded(ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    """What lies behind a ref, in registers of a layout. `optimized`: fail where the copy would be slow."""
    index = () if jax.__version_info__ >= (0, 11, 0) else ((),)
    return mg.load(ref, *index, layout=layout, optimized=optimized)


def x64_reason() -> str | None:
    """Why no kernel is called where JAX makes integers of 64 bits unless told otherwise: in a kernel they meet indices of 32."""
    return "jax_enable_x64, under which a kernel's integers have 64 bits" if config.jax_enable_x64 else None
