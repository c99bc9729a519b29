"""Command R and R+ (Cohere, 2024) compute both halves of a layer in parallel.

They rotate interleaved, and R+ has norms of queries and keys with scales for each head.
"""

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
THETA = 500_000.0
FORM = BlockForm(
    norms=("input_layernorm", None, None, None),
    kind="layer-bias",
    head_scales="stacked",
    parallel=True,
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `CohereConfig`.

    `model_max_length`, which that class does not have, is the length that Command R was trained
    for. Its `max_position_embeddings` is far shorter.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "cohere") as fields:
            head_dim = read_head_dim(fields)
            longest = fields.integer("max_position_embeddings", 8192)
            if fields.rope_parameters(longest, THETA)["rope_type"] == "default":
                longest = fields.optional_integer("model_max_length", None) or longest
            rope, longest = fields.rope(head_dim, longest, theta=THETA)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                head_dim=head_dim,
                max_position_embeddings=longest,
                attention_bias=fields.flag("attention_bias", False),
                rope=(replace(rope, interleaved=True), longest),
                epsilon=("layer_norm_eps", 1e-5),
                logit_scale=fields.number("logit_scale", 0.0625),
                form=FORM,
                norm_heads=fields.flag("use_qk_norm", False),
                tied=True,
            )
