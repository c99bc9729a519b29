"""Mellum 2 (JetBrains, 2026) is Qwen3 with experts, and with sliding windows in some layers.

`layer_types` says in which layers. They have their own rotary embedding.
"""

from __future__ import annotations

from jaxpage.models.config.corrected_experts import sparse_by_type
from jaxpage.models.config.experts import read_experts
from jaxpage.models.config.fields import Fields
from jaxpage.models.config.layer_windows import read_ropes, read_windows, refuse_rope_scaling
from jaxpage.models.config.mtp_names import unread_heads
from jaxpage.models.parts.decoder_config import Defaults
from jaxpage.models.parts.experts import ExpertsConfig
from jaxpage.models.qwen import Qwen3Moe

THETA = {"full_attention": ("", 500_000.0), "sliding_attention": ("", 10_000.0)}


class MellumConfig(ExpertsConfig):
    """Reads transformers' `MellumConfig`."""

    model_type = "mellum"
    aliases = {"num_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"}
    defaults = Defaults(num_kv_heads=4, attention_bias=False)

    @classmethod
    def read(cls, fields: Fields) -> MellumConfig:
        """Returns what the fields say."""
        refuse_rope_scaling(fields)
        fields.only(rope_theta=500_000.0)  # transformers does not read this field.
        head_dim = fields.integer("head_dim", 128)
        num_layers = fields.integer("num_hidden_layers")
        types = fields.layer_types(["full_attention"] * num_layers)
        return cls.from_fields(
            fields,
            head_dim=head_dim,
            sliding_windows=read_windows(fields, types, 1024),
            **read_ropes(fields, types, head_dim, 131_072, THETA),
            experts=read_experts(
                fields,
                count=("num_experts", 64),
                per_token=8,
                width=("moe_intermediate_size", 896),
                normalized=fields.flag("norm_topk_prob", True),
            ),
            sparse_layers=sparse_by_type(fields, (True,) * num_layers),
            draft_heads=unread_heads(fields),
        )


class Mellum(Qwen3Moe, config=MellumConfig):
    """Mellum 2 (JetBrains, 2026) is Qwen3 with experts, and with sliding windows in some layers."""
