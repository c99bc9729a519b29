"""OLMo 2 (OLMo et al., 2025) has norms after both halves of a layer, and none before them.

Norms of queries and keys are over all heads together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.block_form import BlockForm
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
FORM = BlockForm(
    norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"), together=True
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Olmo2Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "olmo2") as fields:
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                max_position_embeddings=fields.integer("max_position_embeddings", 2048),
                attention_bias=fields.flag("attention_bias", False),
                epsilon=("rms_norm_eps", 1e-5),
                form=FORM,
                norm_heads=True,
            )
