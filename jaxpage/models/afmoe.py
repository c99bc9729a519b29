"""Trinity (Arcee AI, 2025) has gated attention, four norms in a layer, and sigmoid routing.

A separate product computes the gates. Sliding-window layers have rotary embeddings, and the others
have none. Attention and the MLP each have a norm before and a norm after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxpage.layers.experts import ExpertsSpec
from jaxpage.models.block_form import BlockForm
from jaxpage.models.corrected_experts import first_dense
from jaxpage.models.experts import ExpertNames, read_experts
from jaxpage.models.fields import Fields
from jaxpage.models.layer_windows import layer_types, rope_with_windows, windows_of
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
FORM = BlockForm(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_mlp_layernorm",
        "post_mlp_layernorm",
    )
)
NAMES = ExpertNames(
    router="router.gate",
    shared=("shared_experts", None),
    correction="expert_bias",
    in_memory=("mlp", "router.gate", "expert_bias"),
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `AfmoeConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "afmoe") as fields:
            head_dim = fields.integer("head_dim", 128)
            types = layer_types(fields, fields.integer("global_attn_every_n_layers", 4))
            window = fields.optional_integer("sliding_window", 1024)
            rope, longest = fields.rope(head_dim, fields.integer("max_position_embeddings", 16_384))
            is_scaled = fields.flag("mup_enabled", False)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                head_dim=head_dim,
                max_position_embeddings=longest,
                sliding_windows=windows_of(fields, types, window),
                attention_bias=fields.flag("attention_bias", False),
                rope=(rope, longest),
                rope_by_layer=rope_with_windows(rope, types),
                epsilon=("rms_norm_eps", 1e-5),
                form=FORM,
                norm_heads=True,
                separate_gates=head_dim,
                embedding_scale=math.sqrt(fields.integer("hidden_size")) if is_scaled else 1.0,
                experts=_read_experts(fields),
                expert_names=NAMES,
                sparse_layers=first_dense(fields, 1, "num_dense_layers"),
            )


def _read_experts(fields: Fields) -> ExpertsSpec:
    # Published files have these fields; transformers' class does not.
    fields.only(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1)
    fields.only(num_expert_groups=1, num_limited_groups=1)
    width = ("moe_intermediate_size", 1408)
    factor = fields.number("route_scale", 1.0)
    return read_experts(
        fields,
        count=("num_experts", 64),
        per_token=6,
        width=width,
        normalized=True,
        routing={"sigmoid": True, "corrected": True, "factor": factor},
        shared_width=fields.integer(*width) * fields.integer("num_shared_experts", 2),
    )
