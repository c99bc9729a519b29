"""Makes the feed-forward half of a layer."""

from __future__ import annotations

from jaxpage.layers.linear import Part, linear
from jaxpage.layers.mlp import MLP, XIELU, GatedMLP
from jaxpage.models.mlp import LLAMA_NAMES, MLPNames, make_gated_mlp
from jaxpage.models.parts.decoder_config import DecoderConfig
from jaxpage.models.parts.scope import Scope


def gated_mlp(
    config: DecoderConfig, at: Scope, *, names: MLPNames = LLAMA_NAMES, width: int | None = None
) -> GatedMLP:
    """Returns a feed-forward half with gates.

    Args:
        config: The config of the model.
        at: The scope of the half.
        names: The names of its products.
        width: The number of gates; None for `intermediate_size` of the config.
    """
    return make_gated_mlp(
        names,
        config.hidden_size,
        width or config.intermediate_size,
        module=at.name,
        bias=config.mlp_bias,
        activation=config.activation,
        dtype=at.dtype,
    )


def plain_mlp(
    config: DecoderConfig,
    at: Scope,
    up: str,
    down: str,
    *,
    bias: bool | None = None,
    activation: str | XIELU | None = None,
    width: int | None = None,
) -> MLP:
    """Returns a feed-forward half without gates.

    Args:
        config: The config of the model.
        at: The scope of the half.
        up: The name of its first product.
        down: The name of its second product.
        bias: True if both have biases; None for `mlp_bias` of the config.
        activation: The function between them; None for that of the config.
        width: The width between them; None for `intermediate_size` of the config.
    """
    inner = width or config.intermediate_size
    has_bias = config.mlp_bias if bias is None else bias
    return MLP(
        linear(
            config.hidden_size,
            Part(inner, "ffn", (at / up).name),
            input_axis="embed",
            bias=has_bias,
            dtype=at.dtype,
        ),
        linear(
            inner,
            Part(config.hidden_size, "embed", (at / down).name),
            input_axis="ffn",
            bias=has_bias,
            dtype=at.dtype,
        ),
        activation=activation or config.activation,
    )
