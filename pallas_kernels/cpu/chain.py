"""Computes some operations of a layer in one call, each of what the one before it made.

Each is computed as it is alone, and has the same bits. But the threads stay together from one to
the next, and XLA starts one operation in place of several, which takes as long as a product of few
rows does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.cpu.packed import Operand
from pallas_kernels.cpu.rows import ACTIVATIONS


class Stage(NamedTuple):
    """One operation of a chain.

    Attributes:
        link: Its number in `Link` of src/ffi.cc.
        arrays: The arrays that it takes beside the rows.
        numbers: The numbers that it takes.
        width: The numbers of a row that it makes; None for as many as it takes.
        num_results: The number of arrays that it makes.
    """

    link: int
    arrays: tuple[Array, ...] = ()
    numbers: tuple[int, int, int] = (0, 0, 0)
    width: int | None = None
    num_results: int = 1


def multiply(weight: Operand, num_out: int) -> Stage:
    """Returns the product with a weight; see `packed.multiply_packed`."""
    numbers = (weight.code, weight.group_size, weight.instructions)
    return Stage(0, weight.arrays, numbers, num_out)


def norm(scale_D: Float[Array, "D"]) -> Stage:
    """Returns an RMS norm; see `rows.rms_norm`."""
    return Stage(1, (scale_D,))


def add_and_norm(added_TD: Float[Array, "T D"], scale_D: Float[Array, "D"]) -> Stage:
    """Returns the sum with other rows and its norm; see `rows.add_and_norm`."""
    return Stage(2, (added_TD, scale_D), num_results=2)


def gate(activation: str, width: int) -> Stage:
    """Returns gates of a width times ups; see `rows.gate`."""
    return Stage(3, numbers=(ACTIVATIONS.index(activation), 0, 0), width=width)


def add_sum() -> Stage:
    """Returns the sum with the sum of the last `add_and_norm`."""
    return Stage(4)


def run(
    x_TI: Float[Array, "T I"], stages: Sequence[Stage], *, epsilon: float = 0.0, offset: float = 0.0
) -> Float[Array, "T O"]:
    """Returns what the last stage makes, in the type of the rows.

    Args:
        x_TI: The rows, in float32 or bfloat16.
        stages: The stages.
        epsilon: The number that norms add to the mean of squares.
        offset: The number that norms add to the scale.
    """
    num_rows, width = x_TI.shape
    shapes = []
    for stage in stages:
        width = stage.width or width
        shapes += [jax.ShapeDtypeStruct((num_rows, width), x_TI.dtype)] * stage.num_results
    call = jax.ffi.ffi_call("jaxpage_run_chain", shapes, vmap_method="sequential")
    made: Sequence[jax.Array] = call(
        x_TI,
        *(jnp.asarray(array) for stage in stages for array in stage.arrays),
        stages=np.array([(stage.link, *stage.numbers) for stage in stages], np.int64).ravel(),
        epsilon=np.float32(epsilon),
        offset=np.float32(offset),
    )
    return made[-1]
