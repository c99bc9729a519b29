"""Ministral 3 (Mistral AI, 2025): Llama whose queries grow with the position, as in Llama 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.fields import Fields, WrongField
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    head_width_or_quotient,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder


class Spec(RotaryDecoderSpec):
    """`Ministral3Config`. `rope_parameters` say how the queries grow."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        fields = Fields(config, "ministral3")
        head_width = fields.optional_integer("head_dim", 128) or head_width_or_quotient(fields)
        longest = fields.integer("max_position_embeddings", 262_144)
        rope = fields.rope(head_width, longest, theta=1_000_000.0)
        parameters = fields.get("rope_parameters", None) or {}
        rate, length = (parameters.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
        if rate is not None and (not isinstance(rate, int | float) or type(length) is not int or length < 1):
            raise WrongField(
                f"llama_4_scaling_beta = {rate!r} with original_max_position_embeddings = {length!r}",
                rope_parameters={},
            )
        return cls._from_fields(
            fields,
            num_kv_heads=key_value_heads(fields, 8),
            head_width=head_width,
            max_position_embeddings=longest,
            sliding_windows=(fields.optional_integer("sliding_window", None),) * fields.integer("num_hidden_layers"),
            rope=rope,
            epsilon=("rms_norm_eps", 1e-5),
            query_growth=None if rate is None else (float(rate), length),
        )
