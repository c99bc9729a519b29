"""OLMoE (Muennighoff et al., 2024) has experts, and norms of queries and keys over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.block_form import BlockForm
from jaxpage.models.experts import read_experts
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
    """Reads transformers' `OlmoeConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "olmoe", {"num_experts": "num_local_experts"}) as fields:
            num_layers = fields.integer("num_hidden_layers")
            width = ("intermediate_size", 2048)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                max_position_embeddings=fields.integer("max_position_embeddings", 4096),
                attention_bias=fields.flag("attention_bias", False),
                epsilon=("rms_norm_eps", 1e-5),
                form=BlockForm(together=True),
                norm_heads=True,
                attention_limit=fields.optional_number("clip_qkv", None),
                experts=read_experts(
                    fields, count=("num_experts", 64), per_token=8, width=width, normalized=None
                ),
                sparse_layers=(True,) * num_layers,
            )
