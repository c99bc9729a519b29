"""Qwen3, dense (Yang et al., 2025), has norms of queries and keys in place of biases.

Its head width does not follow from the model width.
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
    """Reads transformers' `Qwen3Config`.

    An absent `head_dim` is 128, whatever the model width.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "qwen3") as fields:
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 32),
                head_dim=fields.integer("head_dim", 128),
                max_position_embeddings=fields.integer("max_position_embeddings", 32768),
                sliding_windows=windows_by_layer(fields),
                attention_bias=fields.flag("attention_bias", False),
                norm_heads=True,
            )
