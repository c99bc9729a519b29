"""Gemma 1 (Gemma Team, 2024): Llama with wide heads, scaled embeddings, GELU, and norms whose scale is stored less 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import BlockForm, RotaryDecoder, RotaryDecoderSpec, ignored, key_value_heads, prefix

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
FORM = BlockForm(kind="rms+1")
ACTIVATION = "gelu_pytorch_tanh"


class Spec(RotaryDecoderSpec):
    """`GemmaConfig`. `hidden_activation` outranks `hidden_act`, which in old files names the wrong function."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        fields = Fields(config, "gemma")
        return cls._from_fields(
            fields,
            num_kv_heads=key_value_heads(fields, 16),
            head_width=fields.integer("head_dim", 256),
            max_position_embeddings=fields.integer("max_position_embeddings", 8192),
            attention_bias=fields.flag("attention_bias", False),
            activation=("hidden_activation", ACTIVATION),
            embedding_scale=math.sqrt(fields.integer("hidden_size")),
            form=FORM,
            tied=True,
        )
