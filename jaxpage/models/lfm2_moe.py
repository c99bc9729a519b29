"""LFM2 with experts (Liquid AI, 2025) is LFM2 with experts in all but the first few layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.config_fields import WrongField
from jaxpage.models.corrected_experts import first_dense
from jaxpage.models.experts import ExpertNames, read_experts
from jaxpage.models.fields import Fields
from jaxpage.models.lfm2 import FULL, lfm2_knobs
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, ignored, prefix

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
EXPERT_NAMES = ExpertNames(
    "feed_forward",
    "w1",
    "w3",
    "w2",
    correction="expert_bias",
    in_memory=("feed_forward", "gate", "expert_bias"),
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Lfm2MoeConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        config = dict(config)
        # The name of this field in published files outranks that of the class.
        if "tie_embedding" in config:
            config["tie_word_embeddings"] = config.pop("tie_embedding")
        with Fields(config, "lfm2_moe") as fields:
            num_layers = fields.integer("num_hidden_layers")
            if fields.get("layer_types", None) is None:
                text = f"layer_types must name each of the {num_layers} layers, not None"
                fields.note(WrongField(text), layer_types=[FULL] * num_layers)
            return cls._from_fields(
                fields,
                experts=read_experts(
                    fields,
                    count=("num_experts", 32),
                    per_token=4,
                    width=("moe_intermediate_size", 1792),
                    normalized=fields.flag("norm_topk_prob", True),
                    routing={
                        "sigmoid": True,
                        "epsilon": 1e-6,
                        "corrected": fields.flag("use_expert_bias", True),
                        "factor": fields.number("routed_scaling_factor", 1.0),
                    },
                ),
                expert_names=EXPERT_NAMES,
                sparse_layers=first_dense(fields, 2, "num_dense_layers"),
                **lfm2_knobs(fields, [FULL] * num_layers),
            )
