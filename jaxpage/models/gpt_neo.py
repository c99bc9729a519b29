"""GPT-Neo (EleutherAI, 2021) has learned positions, and windows in every other layer.

Scores of attention are not scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.layers.rope import NO_ROTATION
from jaxpage.models.block_form import BlockForm
from jaxpage.models.config_fields import RefusedField
from jaxpage.models.decoder_names import DecoderNames
from jaxpage.models.fields import Fields
from jaxpage.models.gptj import inner_width
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
prefix = "transformer."
ignored = ("*.attention.bias", "*.attention.masked_bias")
ALIASES = {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"}
NAMES = DecoderNames(
    tokens="wte",
    positions="wpe",
    layers="h",
    norm="ln_f",
    attention="attn.attention",
    output="out_proj",
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `GPTNeoConfig`. Dropouts are for training."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "gpt_neo", ALIASES) as fields:
            longest = fields.integer("max_position_embeddings", 2048)
            window = fields.integer("window_size", 256)
            return cls._from_fields(
                fields,
                num_kv_heads=fields.integer("num_attention_heads"),
                head_dim=fields.divide("hidden_size", "num_attention_heads"),
                max_position_embeddings=longest,
                feed_forward_width=inner_width(fields, "intermediate_size"),
                sliding_windows=tuple(
                    window if kind == "local" else None for kind in _kinds(fields)
                ),
                rope=(NO_ROTATION, longest),
                attention_output_bias=True,
                attention_scale=1.0,
                mlp_bias=True,
                plain_mlp=("c_fc", "c_proj"),
                epsilon=("layer_norm_epsilon", 1e-5),
                activation=("activation_function", "gelu_new"),
                form=BlockForm(norms=("ln_1", None, "ln_2", None), kind="layer"),
                name="transformer",
                names=NAMES,
                tied=True,
            )


def _kinds(fields: Fields) -> list[str]:
    """Returns "global" or "local" for each layer; a pattern comes with how often it is repeated."""
    num_layers = fields.integer("num_hidden_layers")
    types = fields.get("attention_types", None) or [[["global", "local"], 12]]
    try:
        kinds = [kind for pattern, count in types for _ in range(count) for kind in pattern]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != num_layers or set(kinds) - {"global", "local"}:
        text = f"attention_types = {types!r} must say global or local of {num_layers} layers"
        fields.note(RefusedField(text), attention_types=[[["global"], num_layers]])
        return ["global"] * num_layers
    return kinds
