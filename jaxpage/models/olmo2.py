"""OLMo 2 (OLMo et al., 2025): norms behind both halves of a layer and none before them; queries and keys normed over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import (
    BlockForm,
    RotaryDecoder,
    RotaryDecoderSpec,
    head_width_or_quotient,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
FORM = BlockForm(norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"), together=True)


class Spec(RotaryDecoderSpec):
    """`Olmo2Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        fields = Fields(config, "olmo2")
        bias = fields.flag("attention_bias", False)
        return cls._from_fields(
            fields,
            num_kv_heads=key_value_heads(fields, None),
            head_width=head_width_or_quotient(fields),
            max_position_embeddings=fields.integer("max_position_embeddings", 2048),
            sliding_windows=(None,) * fields.integer("num_hidden_layers"),
            attention_input_bias=bias,
            attention_output_bias=bias,
            epsilon=("rms_norm_eps", 1e-5),
            form=FORM,
            norm_heads=True,
        )
