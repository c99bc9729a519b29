"""Phi-3 and Phi-4 (Abdin et al., 2024) are Llama with fused products.

Some of them rotate only a part of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.fields import Fields
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
ROPE_NAMES = {"su": "longrope", "yarn": "longrope"}  # Older files have these names.


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Phi3Config`.

    With LongRoPE a sequence may be as long as the original context: see `make_rope`.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "phi3") as fields:
            head_dim = fields.divide("hidden_size", "num_attention_heads")
            longest = fields.integer("max_position_embeddings", 4096)
            window = fields.optional_integer("sliding_window", None)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, None),
                head_dim=head_dim,
                max_position_embeddings=longest,
                sliding_windows=(window,) * fields.integer("num_hidden_layers"),
                rope=fields.rope(head_dim, longest, partial=1.0, aliases=ROPE_NAMES, original=4096),
                epsilon=("rms_norm_eps", 1e-5),
            )
