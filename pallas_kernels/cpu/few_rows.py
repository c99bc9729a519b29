"""Multiplies a few rows of x by a weight as it is stored (`x @ w.T`), in C++.

XLA's own product reads weights at half of the memory's speed or less. The kernel adds floats in the
order of YNNPACK, which computes XLA's products of more rows where there is YNNPACK: so a row has
the same bits on both paths. A caller of both has to check that for each shape
(`jaxpage.device.few_rows`). Sums of int8 are exact in any order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, Int32

from pallas_kernels.cpu import library

MOST_ROWS = 8  # XLA is as fast from 16 rows on (docs/lab-log.md)
_INPUTS_OF_VECTOR = {"float32": 16, "bfloat16": 32, "int8": 64}
_RESULTS = {"float32": ("float32",), "bfloat16": ("bfloat16", "float32"), "int8": ("int32",)}
_OUTPUTS_OF_TILE = 64  # YNNPACK adds other numbers of outputs in another order


def takes(num_rows: int, num_in: int, num_out: int, dtype: DTypeLike, result: DTypeLike) -> bool:
    """Returns whether there is a kernel for such a product.

    Args:
        num_rows: The rows of x (T).
        num_in: The inputs (I).
        num_out: The outputs (O).
        dtype: The type of x and of the weight; int8 for `multiply_rounded`.
        result: The type of the product.
    """
    name = jnp.dtype(dtype).name
    return (
        num_rows <= MOST_ROWS
        and name in library.load().few_rows
        and jnp.dtype(result).name in _RESULTS[name]
        and num_in % _INPUTS_OF_VECTOR[name] == 0
        and num_out % _OUTPUTS_OF_TILE == 0
    )


def multiply_few(
    x_TI: Float[Array, "T I"], w_OI: Float[Array, "O I"], result: DTypeLike
) -> Float[Array, "T O"]:
    """Multiplies rows and a weight that `takes` allows; sums are made in float32."""
    shape = jax.ShapeDtypeStruct((x_TI.shape[0], w_OI.shape[0]), result)
    y_TO: jax.Array = jax.ffi.ffi_call("jaxpage_multiply_few", shape, vmap_method="sequential")(
        x_TI, w_OI
    )
    return y_TO


def multiply_rounded(
    x_TI: Float[Array, "T I"], values_OI: Int8[Array, "O I"]
) -> tuple[Int32[Array, "T O"], Float[Array, "T 1"]]:
    """Returns sums of x, rounded to eight bits, and the scale of each of its rows.

    XLA has to multiply by the scale, as it does for more rows: if an addition follows, XLA rounds
    only once.
    """
    num_rows = x_TI.shape[0]
    num_out = values_OI.shape[0]
    shapes = [
        jax.ShapeDtypeStruct((num_rows, num_out), jnp.int32),
        jax.ShapeDtypeStruct((num_rows, 1), jnp.float32),
    ]
    call = jax.ffi.ffi_call("jaxpage_multiply_rounded", shapes, vmap_method="sequential")
    sums_TO, scale_T1 = call(x_TI.astype(jnp.float32), values_OI)
    return sums_TO, scale_T1
