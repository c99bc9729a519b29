"""Qwen2 with experts (Yang et al., 2024) has one expert that takes all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.config_fields import RefusedField
from jaxpage.models.experts import read_experts, sparse_layers
from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Qwen2MoeConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "qwen2_moe") as fields:
            if fields.flag("use_sliding_window", False):
                text = "use_sliding_window = true is not supported for this family"
                fields.note(RefusedField(text), use_sliding_window=False)
            width = ("moe_intermediate_size", 1408)
            shared = fields.integer("shared_expert_intermediate_size", 5632)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 16),
                max_position_embeddings=fields.integer("max_position_embeddings", 32768),
                attention_input_bias=fields.flag("qkv_bias", True),
                experts=read_experts(
                    fields,
                    count=("num_experts", 60),
                    per_token=4,
                    width=width,
                    normalized=None,
                    shared_width=shared,
                ),
                sparse_layers=sparse_layers(fields),
            )
