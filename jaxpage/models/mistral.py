"""Mistral (Jiang et al., 2023) is Llama with a sliding window in every layer, or in none."""

from __future__ import annotations

from jaxpage.models.config_fields import RefusedField
from jaxpage.models.fields import Fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts.decoder_config import DecoderConfig, key_value_heads, read_common


class MistralConfig(DecoderConfig):
    """Reads transformers' `MistralConfig`.

    An absent `sliding_window` is 4096; null is none.
    """

    model_type = "mistral"

    @classmethod
    def read(cls, fields: Fields) -> MistralConfig:
        """Returns what the fields say."""
        window = fields.optional_integer("sliding_window", 4096)
        uniform = "full_attention" if window is None else "sliding_attention"
        if any(kind != uniform for kind in fields.get("layer_types", None) or ()):
            text = "layer_types that alternate are not part of the mistral family"
            fields.note(RefusedField(text), layer_types=None)
        return cls(
            **read_common(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                max_position_embeddings=fields.integer("max_position_embeddings", 4096 * 32),
                sliding_windows=(window,) * fields.integer("num_hidden_layers"),
            )
        )


class Mistral(Llama, config=MistralConfig):
    """Mistral (Jiang et al., 2023) is Llama with a sliding window in every layer, or in none."""
