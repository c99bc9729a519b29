"""Which products of few rows the kernel for CPUs takes: those that have the bits of XLA's own product, which takes them of more rows.

A token's bits must not depend on how many tokens are computed beside it. The order in which XLA adds is that of a library, and of its
version: so it is not known but asked, once for each shape of a weight, when a step that has it is traced.
"""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpage.layers.product import xla_product
from pallas_kernels.cpu.few_rows import MOST_ROWS, multiply_few, takes

SMALLEST_WEIGHT = 1 << 16  # numbers; to ask costs more than smaller ones gain
ROWS_ASKED, MOST_OUTPUTS_ASKED = 8 * MOST_ROWS, 512
_ASKING = threading.Lock()


def few_rows_product(x_TI: jax.Array, w_OI: jax.Array, result: DTypeLike) -> jax.Array | None:
    """`x @ w.T` by the kernel; None: XLA has to take it."""
    (num_rows, num_in), num_out = x_TI.shape, w_OI.shape[0]
    if (
        num_in * num_out < SMALLEST_WEIGHT
        or x_TI.dtype != w_OI.dtype
        or not takes(num_rows, num_in, num_out, x_TI.dtype, result)
    ):
        return None
    with _ASKING:  # steps are traced by several threads
        same = has_xlas_bits(num_in, num_out, x_TI.dtype.name, jnp.dtype(result).name)
    return multiply_few(x_TI, w_OI, result) if same else None


@functools.cache
def has_xlas_bits(num_in: int, num_out: int, dtype: str, result: str) -> bool:
    """Of many rows, by random numbers. The sums are compared as they are, too: most differences between them are lost in bfloat16."""
    rng = np.random.default_rng(0)
    x_TI, w_OI = (
        rng.standard_normal((rows, num_in), np.float32).astype(dtype)
        for rows in (ROWS_ASKED, min(num_out, MOST_OUTPUTS_ASKED))
    )
    for each in {result, "float32"}:
        theirs = jax.jit(functools.partial(xla_product, result=each)).lower(x_TI, w_OI).compile()(x_TI, w_OI)
        few = jax.jit(functools.partial(multiply_few, result=each)).lower(x_TI[:MOST_ROWS], w_OI).compile()
        ours = [np.asarray(few(x_TI[start : start + MOST_ROWS], w_OI)) for start in range(0, ROWS_ASKED, MOST_ROWS)]
        if not np.array_equal(np.asarray(theirs), np.concatenate(ours)):
            return False
    return True
