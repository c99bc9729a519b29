"""Products with quantised weights in plain XLA, which makes a temporary array of the weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_weight import QuantizedWeight, numbers


def multiply(x_TI: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """The definition: a product in float32."""
    y_TO = jnp.einsum("TI,OI->TO", x_TI.astype(jnp.float32), numbers(weight), precision=jax.lax.Precision.HIGHEST)
    return y_TO.astype(x_TI.dtype)


def multiply_narrow(x_TI: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """For GPUs: weights are rounded to the type of x, so that its fast product takes them."""
    precision = jax.lax.Precision.HIGHEST if x_TI.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum("TI,OI->TO", x_TI, numbers(weight).astype(x_TI.dtype), precision=precision)
