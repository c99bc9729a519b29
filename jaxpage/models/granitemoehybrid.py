"""Granite 4 (IBM, 2025) is Granite with layers of Mamba 2, with experts or without.

Each feed-forward half has an expert of all tokens, which is alone where there are no others. Files
of Granite 4 without the letter H have attention in all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.config_fields import RefusedField
from jaxpage.models.fields import Fields
from jaxpage.models.granite import factors
from jaxpage.models.granitemoe import EXPERT_NAMES, MLP_NAMES, granite_experts
from jaxpage.models.mamba_config import read_mamba
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
FULL = "full_attention"
LINEAR = "linear_attention"
OLDER = {"attention": FULL, "mamba": LINEAR}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `GraniteMoeHybridConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        aliases = {"layer_types": "layers_block_type"}
        with Fields(config, "granitemoehybrid", aliases) as fields:
            num_layers = fields.integer("num_hidden_layers")
            types = fields.layer_types((LINEAR,) * num_layers, kinds=(FULL, LINEAR), older=OLDER)
            mamba = read_mamba(fields)
            head_dim = read_head_dim(fields)
            rope, longest = fields.rope(head_dim, fields.integer("max_position_embeddings", 2048))
            positions = fields.get("position_embedding_type", None)
            if positions not in (None, "nope", "rope"):
                text = f"position_embedding_type = {positions!r} is not one of rope, nope, null"
                fields.note(RefusedField(text), position_embedding_type="rope")
            shared_width = fields.integer("shared_intermediate_size", 1024)
            experts = None
            if fields.integer("num_local_experts", 8, least=0):
                experts = granite_experts(fields, shared_width)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                head_dim=head_dim,
                max_position_embeddings=longest,
                states=tuple(mamba.state if kind == LINEAR else None for kind in types),
                attention_bias=fields.flag("attention_bias", False),
                rope=(rope, longest),
                rope_by_layer=() if positions == "rope" else (None,) * num_layers,
                feed_forward_width=shared_width,
                mlp_names=MLP_NAMES,
                recurrent=mamba if LINEAR in types else None,
                experts=experts,
                expert_names=EXPERT_NAMES,
                sparse_layers=(experts is not None,) * num_layers,
                **factors(fields),
            )
