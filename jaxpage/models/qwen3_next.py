"""Qwen3-Next (Qwen Team, 2025) is Qwen3.5 with experts, in another order of products.

The products of its linear attention go by key heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.experts import read_experts, sparse_layers
from jaxpage.models.fields import Fields
from jaxpage.models.qwen3_5 import hybrid_knobs, ignored
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, key_value_heads, prefix

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Qwen3NextConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "qwen3_next", {"num_experts": "num_local_experts"}) as fields:
            width = ("moe_intermediate_size", 512)
            shared = fields.integer("shared_expert_intermediate_size", 512)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 2),
                experts=read_experts(
                    fields,
                    count=("num_experts", 512),
                    per_token=10,
                    width=width,
                    normalized=fields.flag("norm_topk_prob", True),
                    shared_width=shared,
                ),
                sparse_layers=sparse_layers(fields),
                **hybrid_knobs(fields, grouped=True),
            )
