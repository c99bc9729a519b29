"""Convolves each channel over the inputs of a token and of the few tokens before it."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float


def short_convolution(
    inputs_BWC: Float[Array, "B W C"], kernel_WC: Float[Array, "W C"]
) -> Float[Array, "B C"]:
    """Returns the sum over places of input times kernel, which is added up in their order.

    Args:
        inputs_BWC: The inputs of each row's last tokens, the newest one last.
        kernel_WC: The kernel.
    """
    mixed_BC: jax.Array = inputs_BWC[:, 0] * kernel_WC[:1]
    for place in range(1, kernel_WC.shape[0]):
        mixed_BC += inputs_BWC[:, place] * kernel_WC[place][None]
    return mixed_BC
