"""GPT-OSS (OpenAI, 2025) has experts with biases, and attention sinks.

Every other layer has a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.layers.experts import ClampedSwiGLU
from jaxpage.models.experts import ExpertNames, read_experts
from jaxpage.models.fields import Fields
from jaxpage.models.layer_windows import layer_types, windows_of
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
NAMES = ExpertNames(
    router="router",
    in_memory=("mlp", "router", ""),
    only_stacked=True,
)
ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `GptOssConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        rope = config.get("rope_parameters") or config.get("rope_scaling")
        with Fields(
            config if rope else {**config, "rope_parameters": ROPE},
            "gpt_oss",
            {"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"},
        ) as fields:
            head_dim = fields.integer("head_dim", 64)
            num_layers = fields.integer("num_hidden_layers")
            longest = fields.integer("max_position_embeddings", 131_072)
            swiglu = ClampedSwiGLU(
                fields.number("swiglu_limit", 7.0), fields.number("swiglu_alpha", 1.702)
            )
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                head_dim=head_dim,
                max_position_embeddings=longest,
                sliding_windows=windows_of(
                    fields, layer_types(fields, 2), fields.optional_integer("sliding_window", 128)
                ),
                attention_bias=fields.flag("attention_bias", True),
                sinks=True,
                rope=fields.rope(head_dim, longest, theta=150_000.0),
                epsilon=("rms_norm_eps", 1e-5),
                experts=read_experts(
                    fields,
                    count=("num_local_experts", 128),
                    per_token=4,
                    width=("intermediate_size", 2880),
                    normalized=True,
                    routing={"bias": True},
                    swiglu=swiglu,
                ),
                expert_names=NAMES,
                sparse_layers=(True,) * num_layers,
            )
