"""Qwen2 and Qwen2.5 (Yang et al., 2024) are Llama with biases on queries, keys and values.

Upper layers may have windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.fields import Fields
from jaxpage.models.layer_windows import windows_by_layer
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
    """Reads transformers' `Qwen2Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "qwen2") as fields:
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 32),
                max_position_embeddings=fields.integer("max_position_embeddings", 32768),
                sliding_windows=windows_by_layer(fields),
                attention_input_bias=True,
            )
