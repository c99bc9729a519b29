"""Qwen3-Next (Qwen Team, 2025) is Qwen3.5 with experts, in another order of products.

The products of its linear attention go by key heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.experts import sparse_layers
from jaxpage.models.fields import Fields
from jaxpage.models.qwen3_5 import hybrid_experts, hybrid_knobs, ignored
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, key_value_heads, prefix

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Qwen3NextConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "qwen3_next", {"num_experts": "num_local_experts"}) as fields:
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 2),
                experts=hybrid_experts(
                    fields, 512, 10, normalized=fields.flag("norm_topk_prob", True)
                ),
                sparse_layers=sparse_layers(fields),
                **hybrid_knobs(fields, grouped=True),
            )
