"""FlexOlmo (Shi et al., 2025) has the layers of OLMo 2 and the experts of OLMoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.experts import read_experts
from jaxpage.models.fields import Fields
from jaxpage.models.olmo2 import FORM
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
    """Reads transformers' `FlexOlmoConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "flex_olmo", {"num_experts": "num_local_experts"}) as fields:
            head_dim = read_head_dim(fields)
            longest = fields.integer("max_position_embeddings", 4096)
            width = ("intermediate_size", 11008)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                head_dim=head_dim,
                max_position_embeddings=longest,
                attention_bias=fields.flag("attention_bias", False),
                rope=fields.rope(head_dim, longest, theta=500_000.0),
                form=FORM,
                norm_heads=True,
                experts=read_experts(
                    fields, count=("num_experts", 7), per_token=5, width=width, normalized=None
                ),
                sparse_layers=(True,) * fields.integer("num_hidden_layers"),
            )
