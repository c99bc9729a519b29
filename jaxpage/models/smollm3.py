"""SmolLM3 (Hugging Face, 2025) is Llama in which every fourth layer has no positions (NoPE)."""

from __future__ import annotations

from jaxpage.models.config.fields import Fields
from jaxpage.models.config.layer_windows import rotating_layers, windows_of
from jaxpage.models.llama import Llama
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults


class SmolLM3Config(DecoderConfig):
    """Reads transformers' `SmolLM3Config`.

    `no_rope_layers` has a 1 for each layer that rotates. Where the config uses a window, it is that
    of the layers that do not rotate.
    """

    model_type = "smollm3"
    defaults = Defaults(
        num_kv_heads=4,
        max_length=32768,
        theta=2_000_000.0,
        tied=True,
        attention_bias=False,
        mlp_bias=False,
    )

    @classmethod
    def read(cls, fields: Fields) -> SmolLM3Config:
        """Returns what the fields say."""
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
        return cls.from_fields(
            fields,
            sliding_windows=windows_of(fields, types, window),
            rotates=rotates,
        )


class SmolLM3(Llama, config=SmolLM3Config):
    """SmolLM3 (Hugging Face, 2025) is Llama in which every fourth layer has no positions (NoPE)."""
