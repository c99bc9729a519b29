"""Ministral 3, text (Mistral AI, 2025), is Llama with queries scaled by position.

Llama 4 scales them so too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.config_fields import WrongField
from jaxpage.models.fields import NO_ROPE, Fields
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
ROPE = {  # The parameters of a config that has neither `rope_parameters` nor `rope_scaling`.
    **{
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
    },
    **{
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Ministral3Config`.

    `rope_parameters`, or `rope_scaling`, say how queries are scaled by position.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        if config.get("rope_parameters") is None and not config.get("rope_scaling"):
            config = {**config, "rope_parameters": ROPE}
        with Fields(config, "ministral3") as fields:
            head_dim = fields.optional_integer("head_dim", 128) or read_head_dim(fields)
            longest = fields.integer("max_position_embeddings", 262_144)
            rope = fields.rope(head_dim, longest)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                head_dim=head_dim,
                max_position_embeddings=longest,
                sliding_windows=(fields.optional_integer("sliding_window", None),)
                * fields.integer("num_hidden_layers"),
                rope=rope,
                epsilon=("rms_norm_eps", 1e-5),
                temperature_tuning=read_growth(fields, longest),
            )


def read_growth(fields: Fields, longest: int) -> tuple[float, int, int] | None:
    """Returns `Attention.temperature_tuning`; None if there is no `llama_4_scaling_beta`.

    Args:
        fields: The fields of the config.
        longest: The number of positions.
    """
    parameters = fields.rope_parameters(longest, 10_000.0)
    rate, length = (
        parameters.get(name)
        for name in ("llama_4_scaling_beta", "original_max_position_embeddings")
    )
    if rate is None:
        return None
    if not isinstance(rate, int | float) or type(length) is not int or length < 1:
        text = f"llama_4_scaling_beta = {rate!r} with original_max_position_embeddings = {length!r}"
        fields.note(WrongField(text), **NO_ROPE)
        return None
    return float(rate), length, 0
