"""GPT-OSS (OpenAI, 2025) has experts with biases, and attention sinks.

Every other layer has a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxpage.layers.attention import Scores
from jaxpage.layers.experts import ClampedSwiGLU
from jaxpage.models.config.experts import read_experts
from jaxpage.models.config.fields import Fields
from jaxpage.models.config.layer_windows import layer_types, windows_of
from jaxpage.models.llama import Llama
from jaxpage.models.parts.attention import attention_sinks, grouped_query_attention
from jaxpage.models.parts.decoder_config import key_value_heads, read_common
from jaxpage.models.parts.experts import ExpertNames, ExpertsConfig, mlp_or_experts
from jaxpage.models.parts.scope import Scope

NAMES = ExpertNames(
    router="router",
    in_memory=("mlp", "router", ""),
    only_stacked=True,
)
ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}


class GptOssConfig(ExpertsConfig):
    """Reads transformers' `GptOssConfig`."""

    model_type = "gpt_oss"
    aliases = {"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"}

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config with the rotation that it means."""
        rope = config.get("rope_parameters") or config.get("rope_scaling")
        return config if rope else {**config, "rope_parameters": ROPE}

    @classmethod
    def read(cls, fields: Fields) -> GptOssConfig:
        """Returns what the fields say."""
        types = layer_types(fields, 2)
        window = fields.optional_integer("sliding_window", 128)
        limit = fields.number("swiglu_limit", 7.0)
        return cls(
            **read_common(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                head_dim=fields.integer("head_dim", 64),
                max_position_embeddings=fields.integer("max_position_embeddings", 131_072),
                sliding_windows=windows_of(fields, types, window),
                rope={"theta": 150_000.0},
                epsilon=("rms_norm_eps", 1e-5),
            ),
            attention_bias=fields.flag("attention_bias", True),
            experts=read_experts(
                fields,
                count=("num_local_experts", 128),
                per_token=4,
                width=("intermediate_size", 2880),
                normalized=True,
                routing={"bias": True},
                swiglu=ClampedSwiGLU(limit, fields.number("swiglu_alpha", 1.702)),
            ),
            sparse_layers=(True,) * fields.integer("num_hidden_layers"),
        )


class GptOss(Llama, config=GptOssConfig):
    """GPT-OSS (OpenAI, 2025) has experts with biases, and attention sinks."""

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        scores = Scores(sinks=attention_sinks(config, at / "sinks"))
        return grouped_query_attention(config, index, at, scores=scores)

    @classmethod
    def make_mlp(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the experts of a layer."""
        return mlp_or_experts(config, index, layer, names=NAMES)
