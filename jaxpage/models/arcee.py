"""Arcee (AFM-4.5B, 2025) is Llama with a feed-forward half without gates, of squared ReLU."""

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
    """Reads transformers' `ArceeConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "arcee") as fields:
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                max_position_embeddings=fields.integer("max_position_embeddings", 4096),
                attention_bias=fields.flag("attention_bias", False),
                mlp_bias=fields.flag("mlp_bias", False),
                plain_mlp=("up_proj", "down_proj"),
                epsilon=("rms_norm_eps", 1e-5),
                activation=("hidden_act", "relu2"),
            )
