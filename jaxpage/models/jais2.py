"""Jais 2 (MBZUAI, Inception, Cerebras, 2025) is Llama with LayerNorm, squared ReLU and biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.block_form import BlockForm
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
    """Reads transformers' `Jais2Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "jais2") as fields:
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                max_position_embeddings=fields.integer("max_position_embeddings", 8192),
                attention_bias=fields.flag("attention_bias", True),
                mlp_bias=fields.flag("mlp_bias", True),
                plain_mlp=("up_proj", "down_proj"),
                epsilon=("layer_norm_eps", 1e-5),
                activation=("hidden_act", "relu2"),
                form=BlockForm(kind="layer"),
            )
