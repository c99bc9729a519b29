"""OLMo 3 (Ai2, 2025) is OLMo 2 with a sliding window in three of four layers.

The rotation of these layers is not scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.fields import Fields
from jaxpage.models.layer_windows import layer_types, windows_of
from jaxpage.models.olmo2 import FORM
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
# In `Olmo3Config` too, `rope_theta` does not reach layers with windows.
THETA = {"full_attention": ("rope_theta", 500_000.0), "sliding_attention": ("", 500_000.0)}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Olmo3Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "olmo3") as fields:
            head_dim = read_head_dim(fields)
            types = layer_types(fields, 4)
            ropes, longest = fields.ropes_by_type(
                head_dim, fields.integer("max_position_embeddings", 2048), THETA
            )
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                head_dim=head_dim,
                max_position_embeddings=longest,
                sliding_windows=windows_of(
                    fields, types, fields.optional_integer("sliding_window", 4096)
                ),
                attention_bias=fields.flag("attention_bias", False),
                epsilon=("rms_norm_eps", 1e-5),
                rope=(ropes["full_attention"], longest),
                rope_by_layer=tuple(ropes[kind] for kind in types),
                form=FORM,
                norm_heads=True,
            )
