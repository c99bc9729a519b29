"""Llama 1 to 3 have the form in which many other models are published.

See Touvron et al., 2023, and Grattafiori et al., 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.fields import Fields
from jaxpage.models.mtp_names import read_numbered_names
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder


class Spec(RotaryDecoderSpec):
    """Reads transformers' `LlamaConfig`.

    `attention_bias` puts biases on all four products. `pretraining_tp` only splits products. A head
    for multi-token prediction has DeepSeek's names.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "llama") as fields:
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                max_position_embeddings=fields.integer("max_position_embeddings", 2048),
                attention_bias=fields.flag("attention_bias", False),
                mlp_bias=fields.flag("mlp_bias", False),
                draft_heads=read_numbered_names(fields),
            )
