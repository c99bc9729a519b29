"""Gemma 2 (Gemma Team, 2024) has windows in every second layer, and four norms in a layer.

Scores of attention, and logits, have soft caps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxpage.models.block_form import BlockForm
from jaxpage.models.fields import Fields
from jaxpage.models.gemma import ACTIVATION, refuse_bidirectional
from jaxpage.models.layer_windows import layer_types, windows_of
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["OVERFLOWS_FLOAT16", "Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
OVERFLOWS_FLOAT16 = True
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
FORM = BlockForm(norms=NORMS, kind="rms+1")


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Gemma2Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "gemma2") as fields:
            types = layer_types(fields, 2)
            longest = fields.integer("max_position_embeddings", 8192)
            return cls._from_fields(
                fields,
                max_position_embeddings=longest,
                sliding_windows=windows_of(
                    fields, types, fields.optional_integer("sliding_window", 4096)
                ),
                **gemma_knobs(fields, caps=(50.0, 30.0)),
            )


def gemma_knobs(fields: Fields, *, caps: tuple[float | None, float | None]) -> dict[str, Any]:
    """Returns the arguments of `RotaryDecoderSpec._from_fields` that Gemma 2 and 3 have in common.

    Args:
        fields: The fields of the config.
        caps: The defaults of the soft caps of attention and of logits.
    """
    refuse_bidirectional(fields)
    return {
        "num_kv_heads": key_value_heads(fields, 4),
        "head_dim": fields.integer("head_dim", 256),
        "attention_bias": fields.flag("attention_bias", False),
        "activation": ("hidden_activation", ACTIVATION),
        "embedding_scale": math.sqrt(fields.integer("hidden_size")),
        "attention_scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_softcap": fields.optional_number("attn_logit_softcapping", caps[0]),
        "logit_softcap": fields.optional_number("final_logit_softcapping", caps[1]),
        "form": FORM,
        "tied": True,
    }
