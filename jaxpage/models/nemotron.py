"""Nemotron 3 and 4, dense, and Minitron (NVIDIA, 2024), have LayerNorm and squared ReLU.

The scales of norms are stored less 1, and half of each head is rotated.
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
    read_head_dim,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder


class Spec(RotaryDecoderSpec):
    """Reads transformers' `NemotronConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "nemotron") as fields:
            head_dim = read_head_dim(fields)
            longest = fields.integer("max_position_embeddings", 4096)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                head_dim=head_dim,
                max_position_embeddings=longest,
                attention_bias=fields.flag("attention_bias", False),
                mlp_bias=fields.flag("mlp_bias", False),
                rope=fields.rope(head_dim, longest, partial=0.5),
                plain_mlp=("up_proj", "down_proj"),
                epsilon=("norm_eps", 1e-5),
                activation=("hidden_act", "relu2"),
                form=BlockForm(kind="layer+1"),
            )
