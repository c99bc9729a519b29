"""The product with a quantised weight."""

from __future__ import annotations

import operator

import jax
from jaxtyping import Array, Float

from pallas_kernels.kernel_set import Call
from pallas_kernels.quantized_weight import QuantizedWeight
from pallas_kernels.sets import DEFINITION, first_that_takes


def quantized_product(
    x_TI: Float[Array, "T I"], weight: QuantizedWeight, *, backend: str = "auto", interpret: bool = False
) -> Float[Array, "T O"]:
    """`x @ w.T` in the type of x. The kernels for CPUs make the weights as they multiply; plain XLA makes a temporary array of them.

    backend, interpret: as in `paged_attention`; no kernel of this operation is interpreted.

    Raises NotImplementedError if no backend takes the call; the text has every backend's reason.
    """
    y_TO: jax.Array = first_that_takes(
        "quantized_product",
        operator.attrgetter("multiply"),
        x_TI,
        weight,
        call=Call(weight=weight),
        backend=DEFINITION if interpret else backend,
    )
    return y_TO
