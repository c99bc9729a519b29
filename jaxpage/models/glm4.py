"""GLM-4, dense (Zeng et al., 2024; 0414 and later), has four norms in a layer.

It rotates half of each head, interleaved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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

__all__ = ["OVERFLOWS_FLOAT16", "Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
OVERFLOWS_FLOAT16 = True
FORM = BlockForm(
    norms=(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Glm4Config`.

    `attention_bias` is for queries, keys and values alone.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "glm4") as fields:
            head_width = fields.optional_integer("head_dim", 128) or head_width_or_quotient(fields)
            longest = fields.integer("max_position_embeddings", 131_072)
            rope, longest = fields.rope(head_width, longest, partial=0.5)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 2),
                head_width=head_width,
                max_position_embeddings=longest,
                attention_input_bias=fields.flag("attention_bias", True),
                rope=(replace(rope, interleaved=True), longest),
                epsilon=("rms_norm_eps", 1.5625e-7),
                form=FORM,
            )
