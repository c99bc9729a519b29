"""Gemma 3, text (Gemma Team, 2025), is Gemma 2 with norms of queries and keys.

It has windows in 5 of 6 layers. Attention has no soft cap, and logits have none by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.config_fields import RefusedField
from jaxpage.models.fields import Fields
from jaxpage.models.gemma2 import gemma_knobs
from jaxpage.models.layer_windows import layer_types, windows_of
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    prefix,
)

__all__ = ["OVERFLOWS_FLOAT16", "Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
OVERFLOWS_FLOAT16 = True
THETA = {
    "full_attention": ("rope_theta", 1_000_000.0),
    "sliding_attention": ("rope_local_base_freq", 10_000.0),
}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Gemma3TextConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "gemma3_text") as fields:
            if fields.get("attn_logit_softcapping", None) is not None:
                text = (
                    "attn_logit_softcapping is not supported: attention of Gemma 3 has no softcap"
                )
                fields.note(RefusedField(text), attn_logit_softcapping=None)
            types = layer_types(fields, fields.integer("sliding_window_pattern", 6))
            knobs = gemma_knobs(fields, caps=(None, None))
            ropes, longest = fields.ropes_by_type(
                knobs["head_dim"], fields.integer("max_position_embeddings", 131_072), THETA
            )
            return cls._from_fields(
                fields,
                max_position_embeddings=longest,
                sliding_windows=windows_of(
                    fields, types, fields.optional_integer("sliding_window", 4096)
                ),
                rope=(ropes["full_attention"], longest),
                rope_by_layer=tuple(ropes[kind] for kind in types),
                norm_heads=True,
                **knobs,
            )
