"""ERNIE 4.5 with experts (Baidu, 2025) chooses experts by softmax with corrections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models import rotary_decoder
from jaxpage.models.ernie4_5 import ernie_knobs
from jaxpage.models.experts import ExpertNames, read_experts
from jaxpage.models.fields import Fields
from jaxpage.models.mtp_names import unread_heads
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    prefix,
    read_head_dim,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
# Published files have one MTP head: `model.mtp_block.0`, `model.mtp_emb_norm.0` and others.
ignored = (*rotary_decoder.ignored, "*mtp*")
ALIASES = {"moe_num_experts": "num_experts", "num_experts_per_tok": "moe_k"}
NAMES = ExpertNames(
    shared=("shared_experts", None),
    correction="moe_statics.e_score_correction_bias",
    corrections_in_row=True,
    in_memory=("mlp", "gate", "gate.moe_statics.e_score_correction_bias"),
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Ernie4_5_MoeConfig`.

    `moe_norm_min` is a bound of sums that no sum of softmax scores reaches.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "ernie4_5_moe", ALIASES) as fields:
            fields.only(moe_norm_min=1e-12)
            width = ("moe_intermediate_size", 1536)
            num_shared = fields.integer("moe_num_shared_experts", 2, least=0)
            knobs = ernie_knobs(fields, read_head_dim(fields), 4)
            return cls._from_fields(
                fields,
                head_bias=knobs["mlp_bias"],
                experts=read_experts(
                    fields,
                    count=("moe_num_experts", 64),
                    per_token=6,
                    width=width,
                    normalized=True,
                    routing={"corrected": True},
                    shared_width=num_shared * fields.integer(*width) or None,
                ),
                expert_names=NAMES,
                sparse_layers=_sparse_layers(fields),
                draft_heads=unread_heads(fields, "model.mtp_"),
                **knobs,
            )


def _sparse_layers(fields: Fields) -> tuple[bool, ...]:
    num_layers = fields.integer("num_hidden_layers")
    every = fields.integer("moe_layer_interval", 1)
    first = fields.integer("moe_layer_start_index", 1, least=0)
    last = fields.integer("moe_layer_end_index", -1, least=-1)
    last = num_layers - 1 if last == -1 else last
    return tuple((index + 1) % every == 0 and first <= index <= last for index in range(num_layers))
