"""Makes recurrent layers with their names in a checkpoint."""

from __future__ import annotations

from typing import TypeAlias

from jax.typing import DTypeLike

from jaxpage.layers.convolution import ConvolutionSpec, GatedConvolution
from jaxpage.layers.delta_net import DeltaWidths, GatedDeltaNet
from jaxpage.layers.linear import Part, linear
from jaxpage.layers.mamba import Mamba2, MambaSpec
from jaxpage.layers.mamba1 import Mamba1, Mamba1Spec
from jaxpage.models.delta_config import make_delta_net
from jaxpage.models.mamba_config import make_mamba

RecurrentSpec: TypeAlias = DeltaWidths | MambaSpec | Mamba1Spec | ConvolutionSpec
RecurrentLayer: TypeAlias = GatedDeltaNet | Mamba2 | Mamba1 | GatedConvolution


def make_recurrent(
    spec: RecurrentSpec,
    layer_index: int,
    *,
    width: int,
    epsilon: float,
    layer: str,
    dtype: DTypeLike,
) -> RecurrentLayer:
    """Returns the module.

    Args:
        spec: The description of the layer.
        layer_index: The layer's place in its model.
        width: The width of the model.
        epsilon: The epsilon of the norm.
        layer: The name of the decoder layer in the checkpoint.
        dtype: The type of the parameters.
    """
    if isinstance(spec, MambaSpec | Mamba1Spec):
        return make_mamba(
            spec, layer_index, width=width, epsilon=epsilon, name=f"{layer}.mamba", dtype=dtype
        )
    if isinstance(spec, ConvolutionSpec):
        return make_convolution(spec, layer_index, name=f"{layer}.conv", dtype=dtype)
    name = f"{layer}.self_attn" if spec.by_channel else f"{layer}.linear_attn"
    return make_delta_net(spec, layer_index, width=width, epsilon=epsilon, name=name, dtype=dtype)


def make_convolution(
    spec: ConvolutionSpec, layer_index: int, *, name: str, dtype: DTypeLike
) -> GatedConvolution:
    """Returns LFM2's module, with the names of its checkpoint.

    Args:
        spec: The description of the layer.
        layer_index: The layer's place in its model.
        name: The module's name in the checkpoint.
        dtype: The type of the parameters.
    """
    width = spec.width
    input = linear(
        width,
        Part(3 * width, "heads", f"{name}.in_proj", each=(width,) * 3),
        input_axis="embed",
        bias=spec.bias,
        dtype=dtype,
    )
    output = linear(
        width,
        Part(width, "embed", f"{name}.out_proj"),
        input_axis="heads",
        bias=spec.bias,
        dtype=dtype,
    )
    return GatedConvolution(layer_index, spec, input, output, name=f"{name}.conv", dtype=dtype)
