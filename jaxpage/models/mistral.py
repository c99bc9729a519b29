"""Mistral (Jiang et al., 2023), Mixtral, Ministral 3 (Mistral AI, 2025) and Mistral 4 (2026).

Mistral is Llama with a sliding window, and Mixtral has experts. Ministral 3 scales queries by their
positions, and so does Mistral 4, which has the latent attention of DeepSeek and experts that are
routed by a softmax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from jaxpage.layers import Scores
from jaxpage.models.config import CORRECTED, NO_ROPE, ExpertDefaults, Fields
from jaxpage.models.config.mtp_names import no_heads
from jaxpage.models.deepseek import DeepseekV2, DeepseekV2Config
from jaxpage.models.llama import Llama
from jaxpage.models.parts import ExpertNames, LatentDefaults, Scope, latent
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults, ExpertsConfig

MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MISTRAL4_ROPE = {
    **MINISTRAL3_ROPE,
    **{"rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192},
}


class MistralConfig(DecoderConfig):
    """Reads transformers' `MistralConfig`.

    An absent `sliding_window` is 4096; null is none.
    """

    model_type = "mistral"
    defaults = Defaults(num_kv_heads=8, max_length=4096 * 32)

    @classmethod
    def read(cls, fields: Fields) -> MistralConfig:
        """Returns what the fields say."""
        window = fields.optional_integer("sliding_window", 4096)
        uniform = "full_attention" if window is None else "sliding_attention"
        if any(kind != uniform for kind in fields.get("layer_types", None) or ()):
            text = "layer_types that alternate are not part of the mistral family"
            fields.note_unsupported(text, layer_types=None)
        return cls.from_fields(fields, sliding_windows=window)


class Mistral(Llama, config=MistralConfig):
    """Mistral (Jiang et al., 2023) is Llama with a sliding window in every layer, or in none."""


class MixtralConfig(ExpertsConfig):
    """Reads transformers' `MixtralConfig`."""

    model_type = "mixtral"
    aliases = {"num_local_experts": "num_experts"}
    defaults = Defaults(
        num_kv_heads=8, has_window=True, max_length=4096 * 32, theta=1_000_000.0, epsilon=1e-5
    )
    expert_defaults = ExpertDefaults(
        count_field="num_local_experts",
        count=8,
        per_token=2,
        width_field="intermediate_size",
        width=14336,
        normalized=True,
    )


class Mixtral(Llama, config=MixtralConfig):
    """Mixtral (Jiang et al., 2024) is Mistral with experts."""

    expert_names = ExpertNames("block_sparse_moe", "w1", "w3", "w2")


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(DecoderConfig):
    """Reads transformers' `Ministral3Config`.

    Attributes:
        temperature_tuning: See `Scores`.
    """

    model_type = "ministral3"
    defaults = Defaults(
        num_kv_heads=8,
        head_dim=128,
        has_null_head_dim=True,
        has_window=True,
        max_length=262_144,
        epsilon=1e-5,
    )
    default_rope = MINISTRAL3_ROPE

    temperature_tuning: tuple[float, int, int] | None

    @classmethod
    def read(cls, fields: Fields) -> Ministral3Config:
        """Returns what the fields say."""
        tuning = read_temperature_tuning(fields, cls.defaults.max_length)
        return cls.from_fields(fields, temperature_tuning=tuning)


def read_temperature_tuning(fields: Fields, max_length: int) -> tuple[float, int, int] | None:
    """Returns `Scores.temperature_tuning`; None if there is no `llama_4_scaling_beta`.

    `rope_parameters`, or `rope_scaling`, say how queries are scaled by position.

    Args:
        fields: The fields of the config.
        max_length: The default of `max_position_embeddings`.
    """
    max_length = fields.integer("max_position_embeddings", max_length)
    parameters = fields.rope_parameters(max_length, 10_000.0)
    rate, length = (
        parameters.get(name)
        for name in ("llama_4_scaling_beta", "original_max_position_embeddings")
    )
    if rate is None:
        return None
    if not isinstance(rate, int | float) or type(length) is not int or length < 1:
        text = f"llama_4_scaling_beta = {rate!r} with original_max_position_embeddings = {length!r}"
        fields.note_wrong(text, **NO_ROPE)
        return None
    # Llama 4 counts positions from 1 here, and Mistral from 0.
    return float(rate), length, 0


class Ministral3(Llama, config=Ministral3Config):
    """Ministral 3, text (Mistral AI, 2025), is Llama with queries scaled by position.

    Llama 4 scales them so too.
    """

    @classmethod
    def make_scores(cls, config: Any, at: Scope) -> Scores:
        """Returns the factor that grows with positions."""
        return Scores(temperature_tuning=config.temperature_tuning)


@dataclass(frozen=True, kw_only=True)
class Mistral4Config(DeepseekV2Config):
    """Reads transformers' `Mistral4Config`.

    Attributes:
        temperature_tuning: How queries are scaled by position; see `Scores`.
    """

    model_type = "mistral4"
    aliases = {"n_routed_experts": "num_local_experts"}
    defaults = Defaults(max_length=1_048_576)
    latent_defaults = LatentDefaults(query_rank=1024, rank=256, plain=64, has_share=True)
    expert_defaults = replace(
        CORRECTED, count=128, per_token=4, routing={}, num_dense=("first_k_dense_replace", 0)
    )
    read_draft_heads = staticmethod(no_heads)
    default_rope = MISTRAL4_ROPE

    temperature_tuning: tuple[float, int, int] | None

    @classmethod
    def read(cls, fields: Fields) -> Mistral4Config:
        """Returns what the fields say."""
        tuning = read_temperature_tuning(fields, cls.defaults.max_length)
        return cls.from_fields(fields, temperature_tuning=tuning)


class Mistral4(DeepseekV2, config=Mistral4Config):
    """Mistral 4 (Mistral AI, 2026) has latent attention, experts and queries scaled by position."""

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        tuning = config.temperature_tuning
        return latent.latent_attention(config, config.latent, index, at, temperature_tuning=tuning)
