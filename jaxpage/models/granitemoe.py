"""Granite 3 with experts (IBM, 2024) is Granite whose layers all have experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.experts import ExpertNames, read_experts
from jaxpage.models.fields import Fields
from jaxpage.models.granite import factors
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
NAMES = ExpertNames(
    "block_sparse_moe",
    router="router.layer",
    in_memory=("block_sparse_moe", "router", ""),
    together=("input_linear", "output_linear"),
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `GraniteMoeConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "granitemoe") as fields:
            return cls._from_fields(
                fields,
                experts=read_experts(
                    fields,
                    count=("num_local_experts", 8),
                    per_token=2,
                    width=("intermediate_size", 11008),
                    normalized=True,
                ),
                expert_names=NAMES,
                sparse_layers=(True,) * fields.integer("num_hidden_layers"),
                num_kv_heads=key_value_heads(fields, None),
                max_position_embeddings=fields.integer("max_position_embeddings", 2048),
                attention_bias=fields.flag("attention_bias", False),
                **factors(fields),
            )
