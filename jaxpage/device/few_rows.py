"""Gives products of a few rows of int8 to the kernel for CPUs; sums are exact in any order."""

from __future__ import annotations

import jax

from pallas_kernels.cpu.few_rows import multiply_rounded, takes


def few_rounded_product(
    x_TI: jax.Array, values_OI: jax.Array
) -> tuple[jax.Array, jax.Array] | None:
    """Returns what `rounded_product` returns, by the kernel; None where XLA has to take it."""
    (num_rows, num_in), num_out = x_TI.shape, values_OI.shape[0]
    is_taken = takes(num_rows, num_in, num_out)
    return multiply_rounded(x_TI, values_OI) if is_taken else None
