"""Gemma 1 (Gemma Team, 2024) is Llama with wide heads, scaled embeddings and GELU.

The scale of its norms is stored less 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxpage.models.block_form import BlockForm
from jaxpage.models.config_fields import RefusedField
from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
FORM = BlockForm(kind="rms+1")
ACTIVATION = "gelu_pytorch_tanh"


class Spec(RotaryDecoderSpec):
    """Reads transformers' `GemmaConfig`.

    In `hidden_act`, "gelu" is a legacy value that means the tanh approximation.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        if config.get("hidden_act") == "gelu":
            config = {**config, "hidden_act": ACTIVATION}
        with Fields(config, "gemma") as fields:
            used = fields.get("hidden_act", ACTIVATION)
            other = fields.get("hidden_activation", None)
            if other not in (None, used):
                text = f"hidden_activation = {other!r} is not supported with hidden_act = {used!r}, which is used"
                fields.note(RefusedField(text), hidden_activation=None)
            refuse_bidirectional(fields)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 16),
                head_dim=fields.integer("head_dim", 256),
                max_position_embeddings=fields.integer("max_position_embeddings", 8192),
                attention_bias=fields.flag("attention_bias", False),
                activation=("hidden_act", ACTIVATION),
                embedding_scale=math.sqrt(fields.integer("hidden_size")),
                form=FORM,
                tied=True,
            )


def refuse_bidirectional(fields: Fields) -> None:
    """Notes an error if attention sees later tokens, as in models of embeddings."""
    if fields.get("use_bidirectional_attention", None):
        text = "use_bidirectional_attention (attention to later tokens) is not supported"
        fields.note(RefusedField(text), use_bidirectional_attention=None)
