"""The differences of Pallas' Mosaic GPU backend among the versions of JAX that are supported, in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu

mg: Any = mosaic_gpu  # its names and their types differ among versions


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
        compiler_params=mg.CompilerParams(
            approx_math=True, lowering_semantics=mg.LoweringSemantics.Lane
        ),
        interpret=mosaic_interpreter() if interpret else None,
    )


def mosaic_interpreter() -> Any:
    """Runs a Mosaic kernel on CPU: its threads, barriers and copies are simulated."""
    return mg.InterpretGPUParams()


def transposed(ref: Any) -> Any:
    """Returns a matrix in shared memory, read with its axes swapped."""
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else mg.transpose_ref(ref, (1, 0))


def loaded(ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    """Reads a ref into registers of a layout. optimized: fails where the copy would be slow."""
    index = () if jax.__version_info__ >= (0, 11, 0) else ((),)
    return mg.load(ref, *index, layout=layout, optimized=optimized)
