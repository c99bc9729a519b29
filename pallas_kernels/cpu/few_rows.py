"""`x @ w.T` of a few rows of x and a weight as it is stored, in C++. XLA's own product reads weights at half of the memory's speed or less.

It adds floats in the order of YNNPACK, which takes XLA's products of more rows where there is YNNPACK: so a row has the same bits on both
paths, and a caller of both has to check that for each shape (`jaxpage.device.few_rows`). Sums of int8 are exact in any order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

from pallas_kernels.cpu import library

MOST_ROWS = 8  # from 16 on XLA is as fast (docs/lab-log.md)
_INPUTS_OF_VECTOR = {"float32": 16, "bfloat16": 32, "int8": 64}
_OUTPUTS_OF_TILE = 64  # of YNNPACK: other numbers of outputs are added in another order


def takes(num_rows: int, num_in: int, num_out: int, dtype: DTypeLike, result: DTypeLike) -> bool:
    """Whether there is a kernel for such a product. dtype: of x and of the weight; int8: for `multiply_scaled`. result: of the product."""
    name = jnp.dtype(dtype).name
    return (
        num_rows <= MOST_ROWS
        and name in library.load().few_rows
        and jnp.dtype(result).name in ("float32", name)
        and num_in % _INPUTS_OF_VECTOR[name] == 0
        and num_out % _OUTPUTS_OF_TILE == 0
    )


def multiply_few(x_TI: Float[Array, "T I"], w_OI: Float[Array, "O I"], result: DTypeLike) -> Float[Array, "T O"]:
    """Sums are made in float32. For what `takes` says."""
    shape = jax.ShapeDtypeStruct((x_TI.shape[0], w_OI.shape[0]), result)
    y_TO: jax.Array = jax.ffi.ffi_call("jaxpage_multiply_few", shape, vmap_method="sequential")(x_TI, w_OI)
    return y_TO


def multiply_scaled(
    x_TI: Float[Array, "T I"], values_OI: Int8[Array, "O I"], scale_O: Float[Array, "O"]
) -> Float[Array, "T O"]:
    """By `scale_O[o] * values_OI[o]`, in float32. Each row of x is rounded to eight bits first, with a scale of its own."""
    shape = jax.ShapeDtypeStruct((x_TI.shape[0], scale_O.shape[0]), jnp.float32)
    call = jax.ffi.ffi_call("jaxpage_multiply_scaled", shape, vmap_method="sequential")
    y_TO: jax.Array = call(x_TI.astype(jnp.float32), values_OI, scale_O)
    return y_TO
