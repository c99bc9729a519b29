"""Qwen3.5 and 3.6, dense, text (Qwen Team, 2026), have a gated delta rule in 3 of 4 layers.

The other layers have attention with gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.layers.experts import ExpertsSpec
from jaxpage.models import rotary_decoder
from jaxpage.models.block_form import BlockForm
from jaxpage.models.delta_config import check_activation, read_delta
from jaxpage.models.experts import read_experts
from jaxpage.models.fields import Fields, without_axes
from jaxpage.models.mtp_names import MtpNames, name_apart
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
ignored = (*rotary_decoder.ignored, "model.visual.*")
FULL = "full_attention"
LINEAR = "linear_attention"


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Qwen3_5TextConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(without_axes(config), "qwen3_5_text") as fields:
            return cls._from_fields(
                fields, num_kv_heads=key_value_heads(fields, 4), **hybrid_knobs(fields)
            )


def hybrid_experts(fields: Fields, count: int, per_token: int, *, normalized: bool) -> ExpertsSpec:
    """Reads the experts, one of which takes all tokens; see `read_experts` for the defaults."""
    return read_experts(
        fields,
        count=("num_experts", count),
        per_token=per_token,
        width=("moe_intermediate_size", 512),
        normalized=normalized,
        shared_width=fields.integer("shared_expert_intermediate_size", 512),
    )


def hybrid_knobs(fields: Fields, *, grouped: bool = False) -> dict[str, Any]:
    """Returns arguments of `RotaryDecoderSpec._from_fields`; for `grouped` see `DeltaWidths`."""
    check_activation(fields)
    every = fields.integer("full_attention_interval", 4)
    numbers = range(1, 1 + fields.integer("num_hidden_layers"))
    types = fields.layer_types(
        [LINEAR if number % every else FULL for number in numbers], kinds=(FULL, LINEAR)
    )
    delta = read_delta(fields, grouped=grouped)
    head_dim = fields.integer("head_dim", 256)
    rope, longest = fields.rope(
        head_dim, fields.integer("max_position_embeddings", 32768), partial=0.25
    )
    return {
        "head_dim": head_dim,
        "max_position_embeddings": longest,
        "states": tuple(delta.state if kind == LINEAR else None for kind in types),
        "attention_bias": fields.flag("attention_bias", False),
        "rope": (rope, longest),
        "norm_heads": True,
        "form": BlockForm(kind="rms+1"),
        "recurrent": delta,
        "attention_gated": True,
        "draft_heads": _mtp_names(
            fields, "num_nextn_predict_layers" if grouped else "mtp_num_hidden_layers"
        ),
    }


def _mtp_names(fields: Fields, field: str) -> MtpNames:
    """Returns the names of MTP heads; `field` is that of their number."""
    dedicated = fields.flag("mtp_use_dedicated_embeddings", False)
    return name_apart(
        fields.integer(field, 1, least=0),
        field,
        "mtp_use_dedicated_embeddings = true of config.json" if dedicated else "",
    )
