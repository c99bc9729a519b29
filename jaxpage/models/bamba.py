"""Bamba (IBM, Princeton and UIUC, 2024) has Mamba 2 in most layers, and attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.block_form import BlockForm
from jaxpage.models.config_fields import WrongField
from jaxpage.models.decoder_names import DecoderNames
from jaxpage.models.fields import Fields, without
from jaxpage.models.mamba_config import read_mamba
from jaxpage.models.mlp import MLPNames
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
MLP_NAMES = MLPNames("feed_forward")
FORM = BlockForm(norms=("input_layernorm", None, "pre_ff_layernorm", None))
NAMES = DecoderNames(norm="final_layernorm")


class Spec(RotaryDecoderSpec):
    """Reads transformers' `BambaConfig`.

    The share of a head that is turned is a half, unless `rope_parameters` says otherwise.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        config = without(config, "partial_rotary_factor")
        with Fields(config, "bamba") as fields:
            num_layers = fields.integer("num_hidden_layers")
            attending = fields.get("attn_layer_indices", None) or []
            if not isinstance(attending, list):
                text = f"attn_layer_indices must be a list, not {attending!r}"
                fields.note(WrongField(text), attn_layer_indices=None)
                attending = []
            mamba = read_mamba(fields)
            head_dim = read_head_dim(fields)
            longest = fields.integer("max_position_embeddings", 262_144)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                head_dim=head_dim,
                max_position_embeddings=longest,
                states=tuple(
                    None if index in attending else mamba.state for index in range(num_layers)
                ),
                attention_bias=fields.flag("attention_bias", False),
                rope=fields.rope(head_dim, longest, partial=0.5),
                epsilon=("rms_norm_eps", 1e-5),
                mlp_bias=fields.flag("mlp_bias", False),
                form=FORM,
                names=NAMES,
                mlp_names=MLP_NAMES,
                recurrent=mamba,
            )
