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
from jaxpage.layers.trace_scope import row_kernels


def short_convolution(
    inputs_BWC: Float[Array, "B W C"],
    kernel_C1W: Float[Array, "C 1 W"],
    bias_C: Float[Array, "C"] | None = None,
) -> Float[Array, "B C"]:
    """Returns the sum over places of input times kernel, which is added up in their order.

    Args:
        inputs_BWC: The inputs of each row's last tokens, the newest one last, in float32.
        kernel_C1W: The kernel, as it is stored.
        bias_C: The bias, or None.
    """
    kernel_WC = kernel_C1W[:, 0].astype(jnp.float32).T
    bias_C = None if bias_C is None else bias_C.astype(jnp.float32)
    kernels = row_kernels(jnp.float32)
    if kernels is not None and kernels.convolve is not None:
        return kernels.convolve(inputs_BWC, kernel_WC, bias_C)
    # A loop over places, because XLA may add up a sum in an order that depends on the other axes.
    mixed_BC: jax.Array = inputs_BWC[:, 0] * kernel_WC[:1]
    for index in range(1, kernel_WC.shape[0]):
        mixed_BC += inputs_BWC[:, index] * kernel_WC[index][None]
    return mixed_BC if bias_C is None else mixed_BC + bias_C[None]


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
        layer_index: The layer of the cache that has its states; see `Attend`.
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
        recurrence = Recurrence(self._convolve, None, self.spec.state)
        out_TD, layer_pages = context.recur(
            self.layer_index, before_TD * input_TD, recurrence, layer_pages
        )
        return self.output(after_TD * out_TD.astype(x_TD.dtype)), layer_pages

    def _convolve(self, inputs_BWD: Float[Array, "B W D"]) -> Float[Array, "B D"]:
        bias_D = None if self.bias is None else self.bias[...]
        return short_convolution(inputs_BWD.astype(jnp.float32), self.kernel[...], bias_D)
