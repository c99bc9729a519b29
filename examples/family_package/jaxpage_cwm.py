"""CWM (Meta, 2025): Llama with windows in all layers but every fourth, which sees all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxpage.models import llama
from jaxpage.models.fields import Fields
from jaxpage.models.layer_windows import windows_of
from jaxpage.models.rotary_decoder import RotaryDecoderSpec

prefix, ignored = llama.prefix, llama.ignored
Model = llama.Model
ROPE = {
    **{"rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0},
    **{"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


class Spec:
    """`CwmConfig`. Dropout and `pretraining_tp` mean nothing here."""

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        defaults = {
            **{"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
            **{
                "rms_norm_eps": 1e-5,
                "rope_parameters": None if config.get("rope_scaling") else ROPE,
            },
        }
        as_llama = {**defaults, **config, "model_type": "llama", "attention_bias": False}
        # The end of the block raises all that is wrong, here and in what Llama reads.
        with Fields(config, "cwm") as fields:
            llamas = llama.Spec.from_config(as_llama)
            usual = [
                "sliding_attention" if layer % 4 else "full_attention"
                for layer in range(llamas.kv.num_layers)
            ]
            window = fields.optional_integer("sliding_window", 8192)
            windows = windows_of(fields, fields.layer_types(usual), window)
            return replace(llamas, kv=replace(llamas.kv, sliding_windows=windows))
