"""dots.llm1 (rednote, 2025) has the attention of Qwen3 and the experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.models.corrected_experts import first_dense, read_corrected_experts
from jaxpage.models.experts import DEEPSEEK_NAMES
from jaxpage.models.fields import REQUIRED, Fields
from jaxpage.models.layer_windows import windows_of
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
ALIASES = {"n_routed_experts": "num_local_experts"}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Dots1Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "dots1", ALIASES) as fields:
            window = fields.optional_integer("sliding_window", 4096)
            first = fields.integer("max_window_layers", 62, least=0)
            types = [
                "sliding_attention" if window and index >= first else "full_attention"
                for index in range(fields.integer("num_hidden_layers"))
            ]
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 32),
                max_position_embeddings=fields.integer("max_position_embeddings", 2048),
                sliding_windows=windows_of(fields, fields.layer_types(types), window),
                attention_bias=fields.flag("attention_bias", False),
                norm_heads=True,
                experts=read_corrected_experts(
                    fields,
                    count=REQUIRED,
                    per_token=REQUIRED,
                    width=1408,
                    groups=(1, 1),
                    factor=1.0,
                    normalized=False,
                    shared=REQUIRED,
                ),
                expert_names=DEEPSEEK_NAMES,
                sparse_layers=first_dense(fields, 0),
            )
