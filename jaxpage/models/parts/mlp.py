"""Makes the feed-forward half of a layer."""

from __future__ import annotations

from jaxpage.layers import MLP, GatedMLP
from jaxpage.layers.linear import Part, linear
from jaxpage.layers.mlp import XIELU
from jaxpage.models.parts.names import LLAMA_MLP, MLPNames, Scope
from jaxpage.models.parts.text_config import LayerSizes


def gated_mlp(
    config: LayerSizes, at: Scope, *, names: MLPNames = LLAMA_MLP, width: int | None = None
) -> GatedMLP:
    """Returns a feed-forward half with gates.

    Args:
        config: The config of the model.
        at: The scope of the half.
        names: The names of its products.
        width: The number of gates; None for `intermediate_size` of the config.
    """
    inner = width or config.intermediate_size

    def name_part(part: str | None) -> str | None:
        return part and (at / part).name

    gate_up = linear(
        config.hidden_size,
        *(Part(inner, at.axis("ffn"), name_part(name)) for name in (names.gate, names.up)),
        fused=name_part(names.fused),
        input_axis=at.axis("embed"),
        bias=config.mlp_bias,
        dtype=at.dtype,
    )
    output = names.down, config.hidden_size
    down = at.projection(inner, output, axes=("ffn", "embed"), bias=config.mlp_bias)
    return GatedMLP(gate_up, down, activation=config.activation)


def plain_mlp(
    config: LayerSizes,
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
    outer = config.hidden_size
    return MLP(
        at.projection(outer, (up, inner), axes=("embed", "ffn"), bias=has_bias),
        at.projection(inner, (down, outer), axes=("ffn", "embed"), bias=has_bias),
        activation=activation or config.activation,
    )
