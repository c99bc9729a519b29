"""MiniMax-M2 (MiniMax, 2025) has experts in all layers, and norms over all heads together.

The scores of experts are sigmoids, with corrections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.block_form import BlockForm
from jaxpage.models.experts import ExpertNames, read_experts
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
NAMES = ExpertNames(
    "block_sparse_moe",
    "w1",
    "w3",
    "w2",
    correction="e_score_correction_bias",
    in_memory=("mlp", "gate", "e_score_correction_bias"),
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `MiniMaxM2Config`.

    Published files have `rotary_dim`, which is a width and not a share.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "minimax_m2", {"num_local_experts": "num_experts"}) as fields:
            # Published configs name these, which transformers' class does not have.
            fields.only(use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid")
            fields.only(use_routing_bias=True, shared_intermediate_size=0)
            head_dim = fields.integer("head_dim", 128)
            longest = fields.integer("max_position_embeddings", 196_608)
            turned = fields.optional_integer("rotary_dim", None)
            rope = fields.rope(
                head_dim,
                longest,
                theta=5_000_000.0,
                partial=1.0 if turned is None else turned / head_dim,
            )
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                head_dim=head_dim,
                max_position_embeddings=longest,
                rope=rope,
                form=BlockForm(together=True),
                norm_heads=True,
                experts=read_experts(
                    fields,
                    count=("num_local_experts", 256),
                    per_token=8,
                    width=("intermediate_size", 1536),
                    normalized=True,
                    routing={"sigmoid": True, "corrected": True},
                ),
                expert_names=NAMES,
                sparse_layers=(True,) * fields.integer("num_hidden_layers"),
            )
