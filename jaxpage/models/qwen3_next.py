"""Qwen3-Next (Qwen Team, 2025): Qwen3.5 with experts, whose linear attention has its products by key head."""

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
    """`Qwen3NextConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        with Fields(config, "qwen3_next", {"num_experts": "num_local_experts"}) as fields:
            width, shared = (
                ("moe_intermediate_size", 512),
                fields.integer("shared_expert_intermediate_size", 512),
            )
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
