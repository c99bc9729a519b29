"""Convolves each channel over the inputs of a token and of the few tokens before it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpage.layers.context import ForwardContext, LayerPages, Recurrence, StateSpec
from jaxpage.layers.linear import Linear
from jaxpage.layers.parameter import parameter, tensor


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


@dataclass(frozen=True)
class ConvolutionSpec:
    """Describes a gated convolution.

    Attributes:
        width: The number of channels, which is the width of the model.
        kernel: The number of tokens that the convolution spans.
        bias: True if the convolution and both products have biases.
    """

    width: int
    kernel: int
    bias: bool

    @property
    def state(self) -> StateSpec:
        """Returns what is kept: the channels of each token, and no state."""
        return StateSpec(None, self.width, self.kernel - 1)


class GatedConvolution(nnx.Module):
    """Multiplies its input by a gate before a short convolution, and by another after it (LFM2).

    Attributes:
        layer_index: The layer's place in its model.
        spec: The description of the layer.
        input: The product for the gates before the convolution, those after it, and the input.
        output: The product for the output.
        kernel: The kernel of the convolution.
        bias: The bias of the convolution, or None.
    """

    def __init__(
        self,
        layer_index: int,
        spec: ConvolutionSpec,
        input: Linear,
        output: Linear,
        *,
        name: str,
        dtype: DTypeLike,
    ):
        self.layer_index = layer_index
        self.spec = spec
        self.input = input
        self.output = output
        width = spec.width

        def declare(part: str, *shape: int) -> nnx.Param[jax.Array]:
            source = tensor(f"{name}.{part}", *shape)
            return parameter(shape, axes=(None,) * len(shape), dtype=dtype, sources=[source])

        self.kernel = declare("weight", width, 1, spec.kernel)
        self.bias = declare("bias", width) if spec.bias else None

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages."""
        before_TD, after_TD, input_TD = jnp.split(self.input(x_TD), 3, axis=1)
        recurrence = Recurrence(self._convolved, None, self.spec.state)
        out_TD, layer_pages = context.recur(
            self.layer_index, before_TD * input_TD, recurrence, layer_pages
        )
        return self.output(after_TD * out_TD.astype(x_TD.dtype)), layer_pages

    def _convolved(self, inputs_BWD: Float[Array, "B W D"]) -> Float[Array, "B D"]:
        kernel_WD = self.kernel[...][:, 0].astype(jnp.float32).T
        mixed_BD = short_convolution(inputs_BWD.astype(jnp.float32), kernel_WD)
        return (
            mixed_BD if self.bias is None else mixed_BD + self.bias[...].astype(jnp.float32)[None]
        )
