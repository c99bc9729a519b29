"""CWM (Meta, 2025): Llama with windows in all layers but every fourth, which sees all tokens."""

from __future__ import annotations

from jaxpage.models.config import Fields, layer_windows
from jaxpage.models.llama import Llama
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults

ROPE = {
    **{"rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0},
    **{"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


class CwmConfig(DecoderConfig):
    """Reads transformers' `CwmConfig`. Dropout and `pretraining_tp` mean nothing here."""

    model_type = "cwm"
    defaults = Defaults(
        num_kv_heads=8, head_dim=128, max_length=131_072, epsilon=1e-5, mlp_bias=False
    )
    default_rope = ROPE

    @classmethod
    def read(cls, fields: Fields) -> CwmConfig:
        """Returns what the fields say."""
        layers = range(fields.integer("num_hidden_layers"))
        types = fields.layer_types(
            ["sliding_attention" if layer % 4 else "full_attention" for layer in layers]
        )
        return cls.from_fields(
            fields, sliding_windows=layer_windows.read_windows(fields, types, 8192)
        )


class Cwm(Llama, config=CwmConfig):
    """CWM (Meta, 2025): Llama with windows in all layers but every fourth, which sees all."""
