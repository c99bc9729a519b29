"""CWM, the Code World Model (FAIR CodeGen team, 2025), is Llama with sliding windows.

By default three of four layers have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.fields import Fields
from jaxpage.models.layer_windows import layer_types, windows_of
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
ROPE = {  # The parameters of a config that has neither `rope_parameters` nor `rope_scaling`.
    **{"rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0},
    **{"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `CwmConfig`. `pretraining_tp` only splits products."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        if config.get("rope_parameters") is None and not config.get("rope_scaling"):
            config = {**config, "rope_parameters": ROPE}
        with Fields(config, "cwm") as fields:
            head_width = fields.optional_integer("head_dim", 128) or head_width_or_quotient(fields)
            longest = fields.integer("max_position_embeddings", 131_072)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                head_width=head_width,
                max_position_embeddings=longest,
                sliding_windows=windows_of(
                    fields,
                    layer_types(fields, 4, first=0),
                    fields.optional_integer("sliding_window", 8192),
                ),
                mlp_bias=fields.flag("mlp_bias", False),
                rope=fields.rope(head_width, longest, theta=1_000_000.0),
                epsilon=("rms_norm_eps", 1e-5),
            )
