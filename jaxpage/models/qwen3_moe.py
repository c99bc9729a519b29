"""Qwen3 with experts (Yang et al., 2025) has experts in the layers that its config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    """Reads transformers' `Qwen3MoeConfig`.

    A window, where it is used, is the window of all layers.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "qwen3_moe", {"num_experts": "num_local_experts"}) as fields:
            window = (
                fields.optional_integer("sliding_window", 4096)
                if fields.flag("use_sliding_window", False)
                else None
            )
            width = ("moe_intermediate_size", 768)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 4),
                max_position_embeddings=fields.integer("max_position_embeddings", 32768),
                sliding_windows=(window,) * fields.integer("num_hidden_layers"),
                attention_bias=fields.flag("attention_bias", False),
                norm_heads=True,
                experts=read_experts(
                    fields, count=("num_experts", 128), per_token=8, width=width, normalized=None
                ),
                sparse_layers=sparse_layers(fields),
            )
