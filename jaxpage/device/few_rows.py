"""Gives products of few rows to the kernel for CPUs where it has the bits of XLA's own product.

A token's bits must not depend on how many tokens are computed with it. The order in which XLA adds
is that of a library and of its version. So XLA is asked, once for each shape of a weight, when a
step with that weight is traced. Sums of int8 are exact in any order.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpage.layers.product import xla_product
from pallas_kernels.cpu import library
from pallas_kernels.cpu.few_rows import MOST_ROWS, multiply_few, multiply_rounded, takes

SMALLEST_WEIGHT = 1 << 16  # elements; for smaller weights, asking costs more than the kernel gains
ROWS_ASKED = 8 * MOST_ROWS
MOST_OUTPUTS_ASKED = 512
_ASKING = threading.Lock()


def few_rows_product(x_TI: jax.Array, w_OI: jax.Array, result: DTypeLike) -> jax.Array | None:
    """Returns `x @ w.T` by the kernel; None where XLA has to take it."""
    if x_TI.dtype != w_OI.dtype or not _takes(x_TI, w_OI, result):
        return None
    with _ASKING:  # steps are traced by several threads
        same = has_xlas_bits(*w_OI.shape[::-1], x_TI.dtype.name, jnp.dtype(result).name)
    return multiply_few(x_TI, w_OI, result) if same else None


def few_rounded_product(
    x_TI: jax.Array, values_OI: jax.Array
) -> tuple[jax.Array, jax.Array] | None:
    """Returns what `rounded_product` returns, by the kernel; None where XLA has to take it."""
    return multiply_rounded(x_TI, values_OI) if _takes(x_TI, values_OI, jnp.int32) else None


def _takes(x_TI: jax.Array, w_OI: jax.Array, result: DTypeLike) -> bool:
    num_rows, num_in = x_TI.shape
    num_out = w_OI.shape[0]
    return num_in * num_out >= SMALLEST_WEIGHT and takes(
        num_rows, num_in, num_out, w_OI.dtype, result
    )


@functools.cache
def has_xlas_bits(num_in: int, num_out: int, dtype: str, result: str) -> bool:
    """Returns whether the kernel has the bits of XLA's product of many rows of random numbers.

    The products are compared in the type of the result and in float32: in bfloat16 most differences
    of sums are lost, and XLA may pass a sum on without rounding it to the type of the result. So
    that it can do so, something is computed of each product, as in a step.
    """
    rng = np.random.default_rng(0)
    x_TI, w_OI = (
        rng.standard_normal((rows, num_in), np.float32).astype(dtype)
        for rows in (ROWS_ASKED, min(num_out, MOST_OUTPUTS_ASKED))
    )

    def compiled(
        multiply: Callable[..., jax.Array], num_rows: int, result: str
    ) -> Callable[..., jax.Array]:
        def thrice(x_TI: jax.Array, w_OI: jax.Array) -> jax.Array:
            return 3 * multiply(x_TI, w_OI, result).astype(jnp.float32)

        return jax.jit(thrice).lower(x_TI[:num_rows], w_OI).compile()

    for each in {result, "float32"}:
        many = compiled(xla_product, ROWS_ASKED, each)
        few = compiled(multiply_few, MOST_ROWS, each)
        parts = [np.asarray(few(part, w_OI)) for part in np.split(x_TI, ROWS_ASKED // MOST_ROWS)]
        if not np.array_equal(np.asarray(many(x_TI, w_OI)), np.concatenate(parts)):
            return False
    return True


def few_rows_described() -> str:
    """Returns a sentence on which types the kernel takes.

    For another shape of a weight the answer may be another one.
    """
    types = library.load().few_rows
    taken = [dtype for dtype in types if dtype == "int8" or has_xlas_bits(768, 4096, dtype, dtype)]
    return f"products of up to {MOST_ROWS} rows: {' and '.join(taken) or 'none'}, asked of a weight of 4096 x 768"
