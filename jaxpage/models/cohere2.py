"""Command R7B and Command A (Cohere, 2024) compute both halves of a layer in parallel.

Layers with windows rotate; those without have no positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxpage.models.block_form import BlockForm
from jaxpage.models.fields import Fields
from jaxpage.models.layer_windows import layer_types, rope_with_windows, windows_of
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
FORM = BlockForm(norms=("input_layernorm", None, None, None), kind="layer-bias", parallel=True)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Cohere2Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "cohere2") as fields:
            head_dim = read_head_dim(fields)
            types = layer_types(fields, fields.integer("sliding_window_pattern", 4))
            rope, longest = fields.rope(head_dim, fields.integer("max_position_embeddings", 8192))
            rope = replace(rope, interleaved=True)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                head_dim=head_dim,
                max_position_embeddings=longest,
                sliding_windows=windows_of(
                    fields, types, fields.optional_integer("sliding_window", 4096)
                ),
                attention_bias=fields.flag("attention_bias", False),
                rope=(rope, longest),
                rope_by_layer=rope_with_windows(rope, types),
                epsilon=("layer_norm_eps", 1e-5),
                logit_scale=fields.number("logit_scale", 0.0625),
                form=FORM,
                tied=True,
            )
