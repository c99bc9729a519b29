"""Keeps weights in few bits, with a scale for each group of inputs.

A weight is `(code - zero) * scale`, or `code * scale + minimum`, in float32. Its codes are

    int8: integers. Without zeros nothing is subtracted.
    int4: two of 0 to 15 in a byte, the low nibble first. Without zeros or minima 8 is subtracted.
    fp8:  float8_e4m3fn, or its bits as uint8, because XLA on CPU turns a whole float8 array into
          float16 to take a part of it.
    fp4:  two of float4_e2m1fn in a byte, the low nibble first.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

CODES = ("int8", "int4", "fp8", "fp4")
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class QuantizedWeight(NamedTuple):
    """Holds a weight of O outputs and I inputs; J = ceil(I / group_size) groups.

    Attributes:
        values: The codes [O, I], or [O, I / 2] bytes.
        scale_OJ: The scale of each group.
        zero_OJ: The zero of each group; at most one of zeros and minima is there.
        code: The kind of codes, one of `CODES`.
        group_size: The inputs of a group.
        minimum_OJ: The minimum of each group.
        scale_row_O: The row of scales, zeros and minima of each output, if outputs share rows; None
            if each output has its own.
    """

    values: Shaped[Array, "O _"]
    scale_OJ: Float[Array, "O J"]
    zero_OJ: Float[Array, "O J"] | None
    code: str
    group_size: int
    minimum_OJ: Float[Array, "O J"] | None = None
    scale_row_O: Int[Array, "O"] | None = None

    @property
    def num_in(self) -> int:
        """Returns the number of inputs (I)."""
        return self.values.shape[-1] * (2 if self.code in ("int4", "fp4") else 1)


def numbers(weight: QuantizedWeight) -> Float[Array, "O I"]:
    """Returns the whole weight in float32."""
    if weight.code in ("int4", "fp4"):
        nibbles = jnp.stack([weight.values & 15, weight.values >> 4], axis=-1).reshape(
            weight.values.shape[0], -1
        )
        codes = (
            jnp.asarray(FP4, jnp.float32)[nibbles]
            if weight.code == "fp4"
            else nibbles.astype(jnp.float32)
        )
    else:
        is_bits = weight.code == "fp8" and weight.values.dtype == jnp.uint8
        values = (
            jax.lax.bitcast_convert_type(weight.values, jnp.float8_e4m3fn)
            if is_bits
            else weight.values
        )
        codes = values.astype(jnp.float32)
    scale = _by_input(weight.scale_OJ, weight)
    if weight.minimum_OJ is not None:
        return codes * scale + _by_input(weight.minimum_OJ, weight)
    if weight.zero_OJ is not None:
        codes = codes - _by_input(weight.zero_OJ, weight)
    elif weight.code == "int4":
        codes = codes - 8.0
    return codes * scale


def _by_input(values_OJ: jax.Array, weight: QuantizedWeight) -> jax.Array:
    if weight.scale_row_O is not None:
        values_OJ = values_OJ[weight.scale_row_O]
    return jnp.repeat(values_OJ.astype(jnp.float32), weight.group_size, axis=1)[:, : weight.num_in]
