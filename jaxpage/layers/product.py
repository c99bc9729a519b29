"""The one place that multiplies by weights: it decides the precision, and what a quantised weight does."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8


class Scaled(NamedTuple):
    """A weight of eight bits: row o stands for `scale_O[o] * values_OI[o]`."""

    values_OI: Int8[Array, "O I"]
    scale_O: Float[Array, "O"]


@jax.named_scope("product")  # these names are for profiles: see `bench.step_profile`
def product(
    x_TI: Float[Array, "T I"], weight: jax.Array | Scaled, *, result: DTypeLike | None = None
) -> Float[Array, "T O"]:
    """`x @ weight.T` for a weight that is stored `[out, in]`, as a torch `Linear` stores it.

    Not only to spare a transposition: in this order XLA on CPU computes a row in the same way whether it stands among 2 or among
    512 (docs/lab-log.md), which is what makes a token's result independent of the batch and of how its prompt was cut.

    Float32 means float32: by default XLA would use TF32 for it on GPU and one bfloat16 pass on TPU. Scales go onto the result, not onto
    the weight, so that the integers are converted inside the product.

    Args:
        result: the type of the result, which is also that of the sums; None: as `x`.
    """
    if isinstance(weight, Scaled):
        y_TO = product(x_TI, weight.values_OI.astype(x_TI.dtype), result=result)
        return y_TO * weight.scale_O.astype(y_TO.dtype)
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum("TI,OI->TO", x_TI, weight, precision=precision, preferred_element_type=result)
