"""Helium (Kyutai, 2025) is Llama that rotates interleaved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxpage.models.config_fields import RefusedField
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
    """Reads transformers' `HeliumConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "helium") as fields:
            head_dim = fields.integer("head_dim", 128)
            usual = fields.divide("hidden_size", "num_attention_heads")
            if head_dim != usual:
                text = f"head_dim = {head_dim} is not hidden_size / num_attention_heads = {usual}"
                fields.note(RefusedField(text), head_dim=usual)
            longest = fields.integer("max_position_embeddings", 4096)
            rope, longest = fields.rope(usual, longest, theta=100_000.0)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 20),
                head_dim=usual,
                max_position_embeddings=longest,
                attention_input_bias=fields.flag("attention_bias", False),
                mlp_bias=fields.flag("mlp_bias", False),
                rope=(replace(rope, interleaved=True), longest),
                epsilon=("rms_norm_eps", 1e-8),
            )
