"""SmolLM3 (Hugging Face, 2025) is Llama in which every fourth layer has no positions (NoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.layers.rope import Rope
from jaxpage.models.fields import Fields
from jaxpage.models.layer_windows import rotating_layers, windows_of
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
    read_head_dim,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder


class Spec(RotaryDecoderSpec):
    """Reads transformers' `SmolLM3Config`.

    `no_rope_layers` has a 1 for each layer that rotates.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "smollm3") as fields:
            head_dim = read_head_dim(fields)
            longest = fields.integer("max_position_embeddings", 32768)
            rotates = rotating_layers(fields)
            window = (
                fields.optional_integer("sliding_window", None)
                if fields.flag("use_sliding_window", False)
                else None
            )
            types = [
                "sliding_attention" if window and not turns else "full_attention"
                for turns in rotates
            ]
            rope, longest = fields.rope(head_dim, longest, theta=2_000_000.0)
            by_layer: list[Rope | None] = [rope if turns else None for turns in rotates]
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 4),
                head_dim=head_dim,
                max_position_embeddings=longest,
                sliding_windows=windows_of(fields, fields.layer_types(types), window),
                attention_bias=fields.flag("attention_bias", False),
                mlp_bias=fields.flag("mlp_bias", False),
                rope=(rope, longest),
                rope_by_layer=tuple(by_layer),
                tied=True,
            )
