"""SmolLM3 (Hugging Face, 2025) is Llama in which every fourth layer has no positions (NoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.layers.rope import Rope
from jaxpage.models.config_fields import WrongField
from jaxpage.models.fields import Fields
from jaxpage.models.layer_windows import windows_of
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    head_width_or_quotient,
    ignored,
    key_value_heads,
    prefix,
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
            num_layers = fields.integer("num_hidden_layers")
            head_width = head_width_or_quotient(fields)
            longest = fields.integer("max_position_embeddings", 32768)
            every = fields.integer("no_rope_layer_interval", 4)
            rotates = fields.get("no_rope_layers", None)
            usual = [int((index + 1) % every != 0) for index in range(num_layers)]
            rotates = usual if rotates is None else rotates
            if not isinstance(rotates, list) or len(rotates) != num_layers or set(rotates) - {0, 1}:
                text = f"no_rope_layers must have 0 or 1 for each of {num_layers} layers, not {rotates!r}"
                fields.note(WrongField(text), no_rope_layers=None, num_hidden_layers=num_layers)
                rotates = usual
            window = (
                fields.optional_integer("sliding_window", None)
                if fields.flag("use_sliding_window", False)
                else None
            )
            types = [
                "sliding_attention" if window and not turns else "full_attention"
                for turns in rotates
            ]
            rope, longest = fields.rope(head_width, longest, theta=2_000_000.0)
            by_layer: list[Rope | None] = [rope if turns else None for turns in rotates]
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 4),
                head_width=head_width,
                max_position_embeddings=longest,
                sliding_windows=windows_of(fields, fields.layer_types(types), window),
                attention_bias=fields.flag("attention_bias", False),
                mlp_bias=fields.flag("mlp_bias", False),
                rope=(rope, longest),
                rope_by_layer=tuple(by_layer),
                tied=True,
            )
