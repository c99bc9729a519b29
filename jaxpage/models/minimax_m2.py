"""MiniMax-M2 (MiniMax, 2025) has experts in all layers, and norms over all heads together.

The scores of experts are sigmoids, with corrections.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxpage.models.config.experts import read_experts
from jaxpage.models.config.fields import Fields
from jaxpage.models.parts.attention import grouped_query_attention, norms_over_all_heads
from jaxpage.models.parts.decoder_config import Defaults
from jaxpage.models.parts.experts import ExpertNames, ExpertsConfig
from jaxpage.models.parts.norms import rms_norm
from jaxpage.models.parts.scope import Scope
from jaxpage.models.qwen import Qwen3Moe


class MiniMaxM2Config(ExpertsConfig):
    """Reads transformers' `MiniMaxM2Config`.

    Published files have `rotary_dim`, which is a width and not a share.
    """

    model_type = "minimax_m2"
    aliases = {"num_local_experts": "num_experts"}
    defaults = Defaults(num_kv_heads=8)

    @classmethod
    def read(cls, fields: Fields) -> MiniMaxM2Config:
        """Returns what the fields say."""
        # Published configs name these, which transformers' class does not have.
        fields.only(use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid")
        fields.only(use_routing_bias=True, shared_intermediate_size=0)
        head_dim = fields.integer("head_dim", 128)
        max_length = fields.integer("max_position_embeddings", 196_608)
        rotary_dim = fields.optional_integer("rotary_dim", None)
        share = 1.0 if rotary_dim is None else rotary_dim / head_dim
        return cls.from_fields(
            fields,
            head_dim=head_dim,
            rope=fields.rope(head_dim, max_length, theta=5_000_000.0, partial=share),
            experts=read_experts(
                fields,
                count=("num_local_experts", 256),
                per_token=8,
                width=("intermediate_size", 1536),
                normalized=True,
                routing={"sigmoid": True, "corrected": True},
            ),
        )


class MiniMaxM2(Qwen3Moe, config=MiniMaxM2Config):
    """MiniMax-M2 (MiniMax, 2025) has experts in all layers, and norms over all heads together."""

    expert_names = ExpertNames(
        "block_sparse_moe",
        "w1",
        "w3",
        "w2",
        correction="e_score_correction_bias",
        in_memory=("mlp", "gate", "e_score_correction_bias"),
    )

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        norms = norms_over_all_heads(config, at, rms_norm)
        return grouped_query_attention(config, index, at, norms=norms)
