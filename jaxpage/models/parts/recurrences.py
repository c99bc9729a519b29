"""Makes a recurrent layer, which keeps a state in place of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpage.layers import DeltaWidths, Linear, MambaSpec, RMSNorm
from jaxpage.layers.context import StateSpec
from jaxpage.layers.convolution import ConvolutionSpec, GatedConvolution
from jaxpage.layers.delta_net import ChannelMatmuls, GatedDeltaNet
from jaxpage.layers.mamba import Mamba2
from jaxpage.layers.mamba1 import Mamba1, Mamba1Spec
from jaxpage.models.parts.decoder_config import DecoderConfig
from jaxpage.models.parts.names import Scope
from jaxpage.models.parts.norms import rms_norm


def cache_of_states(states: Sequence[StateSpec | None], num_layers: int) -> dict[str, Any]:
    """Returns the fields of `KVSpec` for a cache whose layers are not those of the decoder.

    Args:
        states: For each layer of the cache, its state; None if it has keys and values.
        num_layers: The number of layers of the decoder.
    """
    return {
        "num_layers": len(states),
        "sliding_windows": (None,) * len(states),
        "states": tuple(states),
        "decoder_layers": num_layers,
    }


def delta_net(
    config: DecoderConfig,
    widths: DeltaWidths,
    index: int,
    at: Scope,
    *,
    input: Linear,
    beta_step: Linear,
    norm: str = "norm",
    output: str = "out_proj",
    channels: ChannelMatmuls | None = None,
) -> GatedDeltaNet:
    """Returns a gated delta net; see `GatedDeltaNet` for the products.

    Args:
        config: The config of the model.
        widths: The widths of its heads.
        index: The number of the layer of the cache that has its states.
        at: The scope of the net.
        input: The projection to queries, keys, values and gates.
        beta_step: The projection to betas and time steps.
        norm: The name of the norm of its outputs.
        output: The name of the output projection.
        channels: The projections to time steps and gates, where each channel has its own decay.
    """
    epsilon = config.norm_epsilon if widths.epsilon is None else widths.epsilon
    return GatedDeltaNet(
        index,
        input,
        beta_step,
        RMSNorm(widths.value, name=(at / norm).name, epsilon=epsilon, axis=None, dtype=at.dtype),
        at.projection(widths.values, (output, config.hidden_size), axes=("heads", "embed")),
        widths,
        channels=channels,
        name=at.name,
        dtype=at.dtype,
    )


def delta_net_of_tensors(
    config: DecoderConfig, widths: DeltaWidths, index: int, at: Scope
) -> GatedDeltaNet:
    """Returns a gated delta net with a tensor for each projection (OLMo Hybrid).

    The arguments are those of `delta_net`.
    """
    width, heads = config.hidden_size, widths.value_heads
    queries_and_keys = ("q_proj", widths.keys), ("k_proj", widths.keys)
    values_and_gates = ("v_proj", widths.values), ("g_proj", widths.values)
    return delta_net(
        config,
        widths,
        index,
        at,
        input=at.projection(width, *queries_and_keys, *values_and_gates),
        beta_step=at.projection(width, ("b_proj", heads), ("a_proj", heads)),
        norm="o_norm",
        output="o_proj",
    )


def mamba2(
    config: DecoderConfig,
    spec: MambaSpec,
    index: int,
    at: Scope,
    *,
    epsilon: float | None = None,
) -> Mamba2:
    """Returns a layer of Mamba 2.

    Args:
        config: The config of the model.
        spec: The description of the layer.
        index: The number of the layer of the cache that has its states.
        at: The scope of the layer.
        epsilon: The epsilon of its norm; None for that of the model's norms.
    """
    norm = None
    if spec.norm != "none":
        norm = RMSNorm(
            spec.inner,
            name=(at / "norm").name,
            epsilon=config.norm_epsilon if epsilon is None else epsilon,
            axis=None,
            groups=spec.groups,
            dtype=at.dtype,
        )
    return Mamba2(
        index,
        spec,
        at.projection(config.hidden_size, ("in_proj", sum(spec.parts)), bias=spec.input_bias),
        norm,
        at.projection(
            spec.inner,
            ("out_proj", config.hidden_size),
            axes=("heads", "embed"),
            bias=spec.output_bias,
        ),
        name=at.name,
        dtype=at.dtype,
    )


def mamba1(
    config: DecoderConfig, spec: Mamba1Spec, index: int, at: Scope, *, convolution_index: int
) -> Mamba1:
    """Returns a layer of Mamba 1.

    Args:
        config: The config of the model.
        spec: The description of the layer.
        index: The number of the layer of the cache that has its states.
        at: The scope of the layer.
        convolution_index: The number of the one that has the inputs of its convolution.
    """
    inner, vector = spec.inner, spec.vector

    def norm(part: str, width: int) -> RMSNorm:
        if spec.plain_epsilon is not None:
            return RMSNorm(width, name=None, epsilon=spec.plain_epsilon, dtype=at.dtype)
        return rms_norm(config, at / f"{part}_layernorm", width=width, axis=None)

    norms = None
    if spec.normed:
        norms = norm("dt", spec.rank), norm("b", vector), norm("c", vector)
    output = ("out_proj", config.hidden_size)
    layer = Mamba1(
        index,
        spec,
        input=at.projection(
            config.hidden_size, ("in_proj", 2 * inner), bias=spec.bias, each=(inner, inner)
        ),
        vectors=at.projection(inner, ("x_proj", spec.rank + 2 * vector), axes=("heads", None)),
        norms=norms,
        time_steps=at.projection(spec.rank, ("dt_proj", inner), axes=(None, "heads")),
        output=at.projection(inner, output, axes=("heads", "embed"), bias=spec.bias),
        name=at.name,
        dtype=at.dtype,
    )
    layer.convolution_index = convolution_index
    return layer


def gated_convolution(spec: ConvolutionSpec, index: int, at: Scope) -> GatedConvolution:
    """Returns a gated short convolution.

    Args:
        spec: The description of the layer.
        index: The number of the layer of the cache that has its states.
        at: The scope of the layer.
    """
    width = spec.width
    return GatedConvolution(
        index,
        spec,
        at.projection(width, ("in_proj", 3 * width), bias=spec.bias, each=(width,) * 3),
        at.projection(width, ("out_proj", width), axes=("heads", "embed"), bias=spec.bias),
        name=(at / "conv").name,
        dtype=at.dtype,
    )
