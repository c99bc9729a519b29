"""ERNIE 4.5, dense (Baidu, 2025), is Llama that rotates interleaved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
    read_head_dim,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Ernie4_5Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "ernie4_5") as fields:
            head_dim = fields.optional_integer("head_dim", 128) or read_head_dim(fields)
            return cls._from_fields(fields, **ernie_knobs(fields, head_dim, 2))


def ernie_knobs(fields: Fields, head_dim: int, num_kv_heads: int) -> dict[str, Any]:
    """Returns arguments of `RotaryDecoderSpec._from_fields` that both families have.

    Args:
        fields: The fields of the config.
        head_dim: The width of a head.
        num_kv_heads: The default of `num_key_value_heads`.
    """
    rope, longest = fields.rope(
        head_dim, fields.integer("max_position_embeddings", 131_072), theta=500_000.0
    )
    bias = fields.flag("use_bias", False)
    return {
        "num_kv_heads": key_value_heads(fields, num_kv_heads),
        "head_dim": head_dim,
        "max_position_embeddings": longest,
        "attention_bias": bias,
        "mlp_bias": bias,
        "rope": (replace(rope, interleaved=True), longest),
        "epsilon": ("rms_norm_eps", 1e-5),
        "tied": True,
    }
