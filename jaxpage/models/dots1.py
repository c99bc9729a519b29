"""dots.llm1 (rednote, 2025) and Solar Open (Upstage, 2025) have the experts of DeepSeek-V3.

Their attention keeps keys and values: that of dots.llm1 is Qwen3's, and that of Solar Open is
Llama's.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxpage.models.config.corrected_experts import first_dense, read_corrected_experts
from jaxpage.models.config.fields import REQUIRED, Fields
from jaxpage.models.config.layer_windows import windows_of
from jaxpage.models.parts.attention import grouped_query_attention
from jaxpage.models.parts.decoder_config import key_value_heads, read_common
from jaxpage.models.parts.experts import DEEPSEEK_NAMES, ExpertsConfig
from jaxpage.models.parts.scope import Scope
from jaxpage.models.qwen import Qwen3Moe


class Dots1Config(ExpertsConfig):
    """Reads transformers' `Dots1Config`."""

    model_type = "dots1"
    aliases = {"n_routed_experts": "num_local_experts"}

    @classmethod
    def read(cls, fields: Fields) -> Dots1Config:
        """Returns what the fields say."""
        window = fields.optional_integer("sliding_window", 4096)
        first = fields.integer("max_window_layers", 62, least=0)
        types = [
            "sliding_attention" if window and index >= first else "full_attention"
            for index in range(fields.integer("num_hidden_layers"))
        ]
        return cls(
            **read_common(
                fields,
                num_kv_heads=key_value_heads(fields, 32),
                max_position_embeddings=fields.integer("max_position_embeddings", 2048),
                sliding_windows=windows_of(fields, fields.layer_types(types), window),
            ),
            attention_bias=fields.flag("attention_bias", False),
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
            sparse_layers=first_dense(fields, 0),
        )


class Dots1(Qwen3Moe, config=Dots1Config):
    """dots.llm1 (rednote, 2025) has the attention of Qwen3 and the experts of DeepSeek-V3."""

    expert_names = DEEPSEEK_NAMES


class SolarOpenConfig(ExpertsConfig):
    """Reads transformers' `SolarOpenConfig`."""

    model_type = "solar_open"
    aliases = {"n_routed_experts": "num_local_experts"}

    @classmethod
    def read(cls, fields: Fields) -> SolarOpenConfig:
        """Returns what the fields say."""
        # Published files have these fields; transformers' class does not.
        fields.only(first_k_dense_replace=0, use_qk_norm=False)
        experts = read_corrected_experts(
            fields, count=128, per_token=8, width=1280, groups=(1, 1), factor=1.0
        )
        return cls(
            **read_common(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                head_dim=fields.integer("head_dim", 128),
                max_position_embeddings=fields.integer("max_position_embeddings", 131_072),
                rope={"theta": 1_000_000.0},
                epsilon=("rms_norm_eps", 1e-5),
                intermediate_size=experts.width,  # No layer is dense.
            ),
            attention_bias=fields.flag("attention_bias", False),
            experts=experts,
            sparse_layers=(True,) * fields.integer("num_hidden_layers"),
        )


class SolarOpen(Dots1, config=SolarOpenConfig):
    """Solar Open (Upstage, 2025) is Llama with the experts of DeepSeek-V3 in all layers."""

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer, with biases where the config has `attention_bias`."""
        return grouped_query_attention(config, index, at, output_bias=False)
