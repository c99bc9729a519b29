"""DeepSeek-V2 (DeepSeek-AI, 2024) has latent attention, and experts.

Some of the experts take all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.config_fields import RefusedField
from jaxpage.models.deepseek_v3 import first_dense, latent_knobs, read_groups
from jaxpage.models.experts import DEEPSEEK_NAMES, read_experts
from jaxpage.models.fields import Fields
from jaxpage.models.mtp_names import read_numbered_names
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, ignored, prefix

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder


class Spec(RotaryDecoderSpec):
    """Reads transformers' `DeepseekV2Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "deepseek_v2", {"n_routed_experts": "num_experts"}) as fields:
            if fields.get("norm_topk_prob", False):
                error = RefusedField("norm_topk_prob = true is not supported for this family")
                fields.note(error, norm_topk_prob=False)
            method = fields.get("topk_method", "greedy")
            if method not in ("greedy", "group_limited_greedy"):
                error = RefusedField(
                    f"topk_method = {method!r} is not greedy or group_limited_greedy"
                )
                fields.note(error, topk_method="greedy")
                method = "greedy"
            count = ("n_routed_experts", 64)
            width = ("moe_intermediate_size", 1407)
            groups = None if method == "greedy" else read_groups(fields, count, best=1)
            return cls._from_fields(
                fields,
                mlp_bias=fields.flag("mlp_bias", False),
                experts=read_experts(
                    fields,
                    count=count,
                    per_token=None,
                    width=width,
                    normalized=False,
                    routing={
                        "groups": groups,
                        "factor": fields.number("routed_scaling_factor", 1.0),
                    },
                    shared_width=fields.integer(*width) * fields.integer("n_shared_experts", 2),
                ),
                expert_names=DEEPSEEK_NAMES,
                sparse_layers=first_dense(fields, 0),
                draft_heads=read_numbered_names(fields),
                **latent_knobs(fields, longest=2048, query_rank=1536),
            )
