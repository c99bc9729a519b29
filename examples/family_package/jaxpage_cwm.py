"""CWM (Meta, 2025): Llama with windows in all layers but every fourth, which sees all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.config.fields import Fields
from jaxpage.models.config.layer_windows import windows_of
from jaxpage.models.llama import Llama
from jaxpage.models.parts.decoder_config import DecoderConfig, key_value_heads, read_common

ROPE = {
    **{"rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0},
    **{"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


class CwmConfig(DecoderConfig):
    """Reads transformers' `CwmConfig`. Dropout and `pretraining_tp` mean nothing here."""

    model_type = "cwm"

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config with the rotation that it has by default."""
        has_rope = config.get("rope_scaling") or config.get("rope_parameters")
        return config if has_rope else {**config, "rope_parameters": ROPE}

    @classmethod
    def read(cls, fields: Fields) -> CwmConfig:
        """Returns what the fields say."""
        layers = range(fields.integer("num_hidden_layers"))
        types = fields.layer_types(
            ["sliding_attention" if layer % 4 else "full_attention" for layer in layers]
        )
        window = fields.optional_integer("sliding_window", 8192)
        return cls(
            **read_common(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                head_dim=fields.integer("head_dim", 128),
                max_position_embeddings=fields.integer("max_position_embeddings", 131_072),
                sliding_windows=windows_of(fields, types, window),
                epsilon=("rms_norm_eps", 1e-5),
            ),
            mlp_bias=fields.flag("mlp_bias", False),
        )


class Cwm(Llama, config=CwmConfig):
    """CWM (Meta, 2025): Llama with windows in all layers but every fourth, which sees all."""
