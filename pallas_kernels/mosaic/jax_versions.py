"""Keeps what differs in Pallas' Mosaic GPU backend between the supported versions of JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu

mg: Any = mosaic_gpu  # its names and their types differ between versions


def mosaic_kernel(
    body: Callable[..., None],
    *,
    out_type: Any,
    grid: dict[str, int],
    thread_name: str,
    num_threads: int,
    interpret: bool,
) -> Callable[..., Any]:
    """Returns a Mosaic GPU kernel of `num_threads` warpgroups.

    A warpgroup finds its place with `lax.axis_index` of a name. The last axis runs fastest. The
    kernel says how registers hold a value (`layout=`), and nothing is inferred: these are "lane"
    semantics, which are not the default in every version.
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
    """Returns the interpreter's parameters; it simulates threads, barriers and copies on CPU."""
    return mg.InterpretGPUParams()


def transpose(ref: Any) -> Any:
    """Returns a matrix in shared memory, read with its axes swapped."""
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else mg.transpose_ref(ref, (1, 0))


def load(ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    """Reads a ref into registers of a layout; with `optimized`, fails if the copy would be slow."""
    index = () if jax.__version_info__ >= (0, 11, 0) else ((),)
    return mg.load(ref, *index, layout=layout, optimized=optimized)
