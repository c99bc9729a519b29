"""Matrix products: one place that decides their precision, and the linear layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def precision(dtype: DTypeLike) -> jax.lax.Precision:
    """Float32 means float32: by default XLA would use TF32 for it on GPU and one bfloat16 pass on TPU."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


class Linear(nnx.Module):
    """`y = x @ kernel.T + bias`. The kernel is stored `[out, in]`, as a torch `Linear` is.

    Not only to spare a transposition: in this order XLA on CPU computes a row in the same way whether it stands among 2 or among
    512 (docs/lab-log.md), which is what makes a token's result independent of the batch and of how its prompt was cut.
    """

    def __init__(self, num_in: int, num_out: int, *, bias: bool, dtype: DTypeLike):
        self.kernel = nnx.Param(jnp.zeros((num_out, num_in), dtype))
        self.bias = nnx.Param(jnp.zeros((num_out,), dtype)) if bias else None

    def __call__(self, x_TI: Float[Array, "T I"]) -> Float[Array, "T O"]:
        kernel_OI = self.kernel[...]
        y_TO = jnp.einsum("TI,OI->TO", x_TI, kernel_OI, precision=precision(kernel_OI.dtype))
        return y_TO if self.bias is None else y_TO + self.bias[...][None, :]
