"""dots.llm1 (rednote, 2025) and Solar Open (Upstage, 2025) have the experts of DeepSeek-V3.

Their attention keeps keys and values: that of dots.llm1 is Qwen3's, and that of Solar Open is
Llama's.
"""

from __future__ import annotations

from jaxpage.models.config.corrected_experts import first_dense, read_corrected_experts
from jaxpage.models.config.fields import REQUIRED, Fields
from jaxpage.models.config.layer_windows import windows_of
from jaxpage.models.llama import Llama
from jaxpage.models.parts.decoder_config import Defaults
from jaxpage.models.parts.experts import DEEPSEEK_NAMES, ExpertsConfig
from jaxpage.models.qwen import Qwen3Moe


class Dots1Config(ExpertsConfig):
    """Reads transformers' `Dots1Config`."""

    model_type = "dots1"
    aliases = {"n_routed_experts": "num_local_experts"}
    defaults = Defaults(num_kv_heads=32, attention_bias=False)

    @classmethod
    def read(cls, fields: Fields) -> Dots1Config:
        """Returns what the fields say."""
        window = fields.optional_integer("sliding_window", 4096)
        first = fields.integer("max_window_layers", 62, least=0)
        types = [
            "sliding_attention" if window and index >= first else "full_attention"
            for index in range(fields.integer("num_hidden_layers"))
        ]
        return cls.from_fields(
            fields,
            sliding_windows=windows_of(fields, fields.layer_types(types), window),
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
    defaults = Defaults(
        num_kv_heads=8,
        head_dim=128,
        max_length=131_072,
        theta=1_000_000.0,
        epsilon=1e-5,
        attention_bias=False,
    )

    @classmethod
    def read(cls, fields: Fields) -> SolarOpenConfig:
        """Returns what the fields say."""
        # Published files have these fields; transformers' class does not.
        fields.only(first_k_dense_replace=0, use_qk_norm=False)
        experts = read_corrected_experts(
            fields, count=128, per_token=8, width=1280, groups=(1, 1), factor=1.0
        )
        return cls.from_fields(
            fields,
            intermediate_size=experts.width,  # No layer is dense.
            experts=experts,
        )


class SolarOpen(Llama, config=SolarOpenConfig):
    """Solar Open (Upstage, 2025) is Llama with the experts of DeepSeek-V3 in all layers."""

    expert_names = DEEPSEEK_NAMES
    output_bias = False
