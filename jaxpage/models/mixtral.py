"""Mixtral (Jiang et al., 2024) is Mistral with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.experts import ExpertNames, read_experts
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
NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")


class Spec(RotaryDecoderSpec):
    """Reads transformers' `MixtralConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "mixtral", {"num_local_experts": "num_experts"}) as fields:
            num_layers = fields.integer("num_hidden_layers")
            head_dim = read_head_dim(fields)
            longest = fields.integer("max_position_embeddings", 4096 * 32)
            width = ("intermediate_size", 14336)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                head_dim=head_dim,
                max_position_embeddings=longest,
                sliding_windows=(fields.optional_integer("sliding_window", None),) * num_layers,
                rope=fields.rope(head_dim, longest, theta=1_000_000.0),
                epsilon=("rms_norm_eps", 1e-5),
                experts=read_experts(
                    fields,
                    count=("num_local_experts", 8),
                    per_token=2,
                    width=width,
                    normalized=True,
                ),
                expert_names=NAMES,
                sparse_layers=(True,) * num_layers,
            )
