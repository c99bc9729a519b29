"""Multiplies by quantised weights in plain XLA, which makes a temporary array of the weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.quantized_weight import QuantizedWeight, numbers


def multiply(x_TI: jax.Array, weight: QuantizedWeight, result: DTypeLike) -> jax.Array:
    """Defines the product: it is computed in float32."""
    y_TO = jnp.einsum(
        "TI,OI->TO", x_TI.astype(jnp.float32), numbers(weight), precision=jax.lax.Precision.HIGHEST
    )
    return y_TO.astype(result)


def multiply_narrow(x_TI: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Multiplies on GPUs, where weights are rounded to the type of x for its fast product."""
    # By default a GPU would round operands of float32 to TF32.
    precision = (
        jax.lax.Precision.HIGHEST if x_TI.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    )
    return jnp.einsum("TI,OI->TO", x_TI, numbers(weight).astype(x_TI.dtype), precision=precision)


def has_scales_of_outputs(weight: QuantizedWeight) -> bool:
    """Returns whether a weight is its codes times one scale for each output.

    `multiply_before_scales` takes such weights.
    """
    plain = weight.zero_OJ is None and weight.minimum_OJ is None and weight.code in ("int8", "fp8")
    return plain and weight.scale_OJ.shape[1] == 1


def multiply_before_scales(x_TI: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Returns the product in float32: sums over codes, which are exact in x's type, times scales.

    On GPUs XLA fuses all of it, and reads the codes once.
    """
    is_bits = weight.code == "fp8" and weight.values.dtype == jnp.uint8
    codes = (
        jax.lax.bitcast_convert_type(weight.values, jnp.float8_e4m3fn) if is_bits else weight.values
    )
    precision = (
        jax.lax.Precision.HIGHEST if x_TI.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    )
    sums_TO = jnp.einsum(
        "TI,OI->TO",
        x_TI,
        codes.astype(x_TI.dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return sums_TO * weight.scale_OJ[:, 0].astype(jnp.float32)


def multiply_on_gpu(x_TI: jax.Array, weight: QuantizedWeight, result: DTypeLike) -> jax.Array:
    """Multiplies in the way that XLA compiles best for GPUs.

    It makes no temporary array of the weight if it can avoid that.
    """
    if has_scales_of_outputs(weight):
        return multiply_before_scales(x_TI, weight).astype(result)
    return multiply_narrow(x_TI, weight).astype(result)
