"""GPT-OSS (OpenAI, 2025) has experts with biases, and attention sinks.

Every other layer has a window.
"""

from __future__ import annotations

from typing import Any

from jaxpage.layers import Scores
from jaxpage.layers.experts import ClampedSwiGLU
from jaxpage.models.config import ExpertDefaults, Fields, layer_windows
from jaxpage.models.llama import Llama
from jaxpage.models.parts import Defaults, ExpertNames, ExpertsConfig, Scope, attention

ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}


class GptOssConfig(ExpertsConfig):
    """Reads transformers' `GptOssConfig`."""

    model_type = "gpt_oss"
    aliases = {"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"}
    defaults = Defaults(
        num_kv_heads=8,
        head_dim=64,
        max_length=131_072,
        theta=150_000.0,
        epsilon=1e-5,
        attention_bias=True,
    )
    expert_defaults = ExpertDefaults(
        count_field="num_local_experts",
        count=128,
        per_token=4,
        width_field="intermediate_size",
        width=2880,
        normalized=True,
        routing={"bias": True},
    )
    default_rope = ROPE

    @classmethod
    def read(cls, fields: Fields) -> GptOssConfig:
        """Returns what the fields say."""
        types = layer_windows.layer_types(fields, 2)
        limit = fields.number("swiglu_limit", 7.0)
        # GELU is about `x * sigmoid(1.702 x)` (Hendrycks and Gimpel, 2016). This factor and the
        # limit are constants in OpenAI's code.
        swiglu = ClampedSwiGLU(limit, fields.number("swiglu_alpha", 1.702))
        return cls.from_fields(
            fields,
            sliding_windows=layer_windows.read_windows(fields, types, 128),
            experts=cls.expert_defaults.read(fields, swiglu=swiglu),
        )


class GptOss(Llama, config=GptOssConfig):
    """GPT-OSS (OpenAI, 2025) has experts with biases, and attention sinks."""

    expert_names = ExpertNames(
        router="router",
        in_memory=("mlp", "router", ""),
        only_stacked=True,
    )

    @classmethod
    def make_scores(cls, config: Any, at: Scope) -> Scores:
        """Returns the sinks."""
        return Scores(sinks=attention.attention_sinks(config, at / "sinks"))
