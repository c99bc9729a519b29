"""SmolLM3 (Hugging Face, 2025) is Llama in which every fourth layer has no positions (NoPE)."""

from __future__ import annotations

from jaxpage.models.config.fields import Fields
from jaxpage.models.config.layer_windows import rotating_layers, windows_of
from jaxpage.models.llama import Llama
from jaxpage.models.parts import decoder_config
from jaxpage.models.parts.decoder_config import DecoderConfig, key_value_heads, read_common


class SmolLM3Config(DecoderConfig):
    """Reads transformers' `SmolLM3Config`.

    `no_rope_layers` has a 1 for each layer that rotates. Where the config uses a window, it is that
    of the layers that do not rotate.
    """

    model_type = "smollm3"

    @classmethod
    def read(cls, fields: Fields) -> SmolLM3Config:
        """Returns what the fields say."""
        head_dim = decoder_config.read_head_dim(fields)
        max_length = fields.integer("max_position_embeddings", 32768)
        rotates = rotating_layers(fields)
        window = None
        if fields.flag("use_sliding_window", False):
            window = fields.optional_integer("sliding_window", None)
        types = fields.layer_types(
            [
                "sliding_attention" if window and not does_rotate else "full_attention"
                for does_rotate in rotates
            ]
        )
        rope, reach = fields.rope(head_dim, max_length, theta=2_000_000.0)
        return cls(
            **read_common(
                fields,
                num_kv_heads=key_value_heads(fields, 4),
                head_dim=head_dim,
                max_position_embeddings=reach,
                sliding_windows=windows_of(fields, types, window),
                rope=(rope, reach),
                tied=True,
            ),
            rope_by_layer=tuple(rope if does_rotate else None for does_rotate in rotates),
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
        )


class SmolLM3(Llama, config=SmolLM3Config):
    """SmolLM3 (Hugging Face, 2025) is Llama in which every fourth layer has no positions (NoPE)."""
