"""Qwen3.5 and 3.6 with experts, text (Qwen Team, 2026), have one expert for all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models import rotary_decoder
from jaxpage.models.fields import Fields, without_axes
from jaxpage.models.qwen3_5 import hybrid_experts, hybrid_knobs
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
ignored = (*rotary_decoder.ignored, "model.visual.*")


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Qwen3_5MoeTextConfig`.

    All layers have experts, so there is no other inner width.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields({"intermediate_size": 1, **without_axes(config)}, "qwen3_5_moe_text") as fields:
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 2),
                experts=hybrid_experts(fields, 256, 8, normalized=True),
                sparse_layers=(True,) * fields.integer("num_hidden_layers"),
                **hybrid_knobs(fields),
            )
