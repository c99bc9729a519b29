"""Computes some operations of a layer in one call, each of what the one before it made.

Each is computed as it is alone, and has the same bits. But the threads stay together from one to
the next, and XLA starts one operation in place of several, which takes as long as a product of few
rows does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu.packed import Operand, count_of
from pallas_kernels.cpu.rows import ACTIVATIONS

# The operations, by their numbers in `Operation` of src/ffi.cc.
MULTIPLY, NORM, ADD_AND_NORM, GATE, ADD = range(5)


class Stage(NamedTuple):
    """One operation of a fusion.

    Attributes:
        operation: The operation.
        arrays: The arrays that it takes beside the rows.
        numbers: The numbers that it takes.
        num_out: The numbers of a row that a product makes; None for other operations.
    """

    operation: int
    arrays: tuple[Array, ...] = ()
    numbers: tuple[int, int, int] = (0, 0, 0)
    num_out: int | None = None


def multiply(weight: Operand, num_out: int) -> Stage:
    """Returns the product with a weight; see `packed.multiply_packed`."""
    numbers = (weight.code, weight.group_size, weight.instructions)
    return Stage(MULTIPLY, weight.arrays, numbers, num_out)


def norm(scale_D: Float[Array, "D"]) -> Stage:
    """Returns an RMS norm; see `rows.rms_norm`."""
    return Stage(NORM, (scale_D,))


def add_and_norm(added_TD: Float[Array, "T D"], scale_D: Float[Array, "D"]) -> Stage:
    """Returns the sum with other rows and its norm; see `rows.add_and_norm`."""
    return Stage(ADD_AND_NORM, (added_TD, scale_D))


def gate(activation: str) -> Stage:
    """Returns an activation of gates times ups; see `rows.gate`."""
    return Stage(GATE, numbers=(ACTIVATIONS.index(activation), 0, 0))


def add_sum() -> Stage:
    """Returns the sum with the sum of the last `add_and_norm`."""
    return Stage(ADD)


def run(
    x_TI: Float[Array, "T I"],
    stages: Sequence[Stage],
    *,
    epsilon: float = 0.0,
    offset: float = 0.0,
    num_rows: Int[Array, ""] | None = None,
) -> Sequence[Float[Array, "T _"]]:
    """Returns what the stages make, in the type of the rows.

    A stage of `add_and_norm` makes the sum, then the norm. Each other one makes one array.

    Args:
        x_TI: The rows, in float32 or bfloat16.
        stages: The stages.
        epsilon: The number that norms add to the mean of squares.
        offset: The number that norms add to the scale.
        num_rows: The number of rows, after which there is padding, whose results are zero; None if
            there is none.
    """
    size, width = x_TI.shape
    shapes = []
    for stage in stages:
        width = width // 2 if stage.operation == GATE else stage.num_out or width
        shape = jax.ShapeDtypeStruct((size, width), x_TI.dtype)
        # The sum is an array of its own: a later `add_sum` reads it.
        shapes += [shape] * (2 if stage.operation == ADD_AND_NORM else 1)
    call = jax.ffi.ffi_call("jaxpage_run_fusion", shapes, vmap_method="sequential")
    made: Sequence[jax.Array] = call(
        x_TI,
        count_of(num_rows),
        *(array for stage in stages for array in stage.arrays),
        stages=np.array([(stage.operation, *stage.numbers) for stage in stages], np.int64).ravel(),
        epsilon=np.float32(epsilon),
        offset=np.float32(offset),
    )
    return made
