"""GLM-4-9B and GLM-Edge (Zeng et al., 2024) rotate half of each head, interleaved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxpage.models.block_form import BlockForm
from jaxpage.models.fields import Fields
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


class Spec(RotaryDecoderSpec):
    """Reads transformers' `GlmConfig`.

    `attention_bias` is for queries, keys and values alone.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        return cls._read(config, "glm", BlockForm())

    @classmethod
    def _read(
        cls, config: Mapping[str, Any], model_type: str, form: BlockForm
    ) -> RotaryDecoderSpec:
        """Returns the spec of a config.json of this model type, whose layers have this form."""
        with Fields(config, model_type) as fields:
            head_dim = fields.optional_integer("head_dim", 128) or read_head_dim(fields)
            longest = fields.integer("max_position_embeddings", 131_072)
            rope, longest = fields.rope(head_dim, longest, partial=0.5)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 2),
                head_dim=head_dim,
                max_position_embeddings=longest,
                attention_input_bias=fields.flag("attention_bias", True),
                rope=(replace(rope, interleaved=True), longest),
                epsilon=("rms_norm_eps", 1.5625e-7),
                form=form,
            )
