"""Multiplies a few rows of x, rounded to eight bits, by a weight of int8 (`x @ w.T`), in C++.

XLA's own product reads weights at half of the memory's speed or less.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Int32

from pallas_kernels.cpu import library

MOST_ROWS = 8  # XLA is as fast from 16 rows on (docs/lab-log.md)
_INPUTS_OF_VECTOR, _OUTPUTS_OF_UNIT = 64, 16


def takes(num_rows: int, num_in: int, num_out: int) -> bool:
    """Returns whether there is a kernel for a product of rows [T, I] and a weight [O, I]."""
    return (
        num_rows <= MOST_ROWS
        and "int8" in library.load().dot_types
        and num_in % _INPUTS_OF_VECTOR == 0
        and num_out % _OUTPUTS_OF_UNIT == 0
    )


def multiply_rounded(
    x_TI: Float[Array, "T I"], values_OI: Int8[Array, "O I"]
) -> tuple[Int32[Array, "T O"], Float[Array, "T 1"]]:
    """Returns sums of x, rounded to eight bits, and the scale of each of its rows.

    XLA has to multiply by the scale, as it does for more rows: if an addition follows, XLA rounds
    only once.
    """
    num_rows, num_out = x_TI.shape[0], values_OI.shape[0]
    shapes = [
        jax.ShapeDtypeStruct((num_rows, num_out), jnp.int32),
        jax.ShapeDtypeStruct((num_rows, 1), jnp.float32),
    ]
    call = jax.ffi.ffi_call("jaxpage_multiply_rounded", shapes, vmap_method="sequential")
    sums_TO, scale_T1 = call(x_TI.astype(jnp.float32), values_OI)
    return sums_TO, scale_T1
