"""Seed-OSS (ByteDance Seed, 2025) is Llama with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    """Reads transformers' `SeedOssConfig`. Dropouts are for training."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "seed_oss") as fields:
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                head_dim=fields.optional_integer("head_dim", 128),
                max_position_embeddings=fields.integer("max_position_embeddings", 524_288),
                attention_input_bias=fields.flag("attention_bias", True),
                attention_output_bias=fields.flag("attention_out_bias", False),
                mlp_bias=fields.flag("mlp_bias", False),
            )
