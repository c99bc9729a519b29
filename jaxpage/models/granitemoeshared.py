"""GraniteMoeShared (IBM, 2025) is Granite with routed experts and a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.experts import read_experts
from jaxpage.models.fields import Fields
from jaxpage.models.granite import factors
from jaxpage.models.granitemoehybrid import EXPERT_NAMES, MLP_NAMES
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
    """Reads transformers' `GraniteMoeSharedConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "granitemoeshared") as fields:
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                max_position_embeddings=fields.integer("max_position_embeddings", 2048),
                attention_bias=fields.flag("attention_bias", False),
                mlp_names=MLP_NAMES,
                experts=read_experts(
                    fields,
                    count=("num_local_experts", 8),
                    per_token=2,
                    width=("intermediate_size", 11008),
                    normalized=True,
                    shared_width=fields.integer("shared_intermediate_size", 0, least=0) or None,
                ),
                expert_names=EXPERT_NAMES,
                sparse_layers=(True,) * fields.integer("num_hidden_layers"),
                **factors(fields),
            )
