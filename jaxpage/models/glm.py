"""GLM-4 and GLM-Edge (Zeng et al., 2024), GLM-4.5 to 4.7 (Z.ai, 2025) and GLM-5 (2026).

They rotate half of each head. GLM-4.5 to 4.7 have the experts of DeepSeek-V3; GLM-4.7 Flash and
GLM-5 have its latent attention as well, and GLM-5 also the indexer of V3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxpage.layers import HeadNorms
from jaxpage.models import deepseek
from jaxpage.models.config import CORRECTED, Fields
from jaxpage.models.config.mtp_names import read_numbered_names
from jaxpage.models.llama import Llama
from jaxpage.models.parts import DEEPSEEK_EXPERTS, LatentDefaults, NormNames, Scope, attention
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults, ExpertsConfig
from jaxpage.models.qwen import Qwen3Moe


class GlmConfig(DecoderConfig):
    """Reads transformers' `GlmConfig`."""

    model_type = "glm"
    defaults = Defaults(
        num_kv_heads=2,
        head_dim=128,
        has_null_head_dim=True,
        max_length=131_072,
        partial=0.5,
        # GLM-4 rotates neighbours, (2i, 2i + 1); GLM-4.5 rotates halves, as Llama does.
        interleaved=True,
        # So in the class of transformers: it is 1e-5 / 64.
        epsilon=1.5625e-7,
        attention_bias=True,
    )


class Glm(Llama, config=GlmConfig):
    """GLM-4-9B and GLM-Edge (Zeng et al., 2024) rotate half of each head, interleaved."""

    output_bias = False


class Glm4Config(GlmConfig):
    """Reads transformers' `Glm4Config`."""

    model_type = "glm4"


class Glm4(Glm, config=Glm4Config):
    """GLM-4, dense (Zeng et al., 2024; 0414 and later), is GLM-4-9B with four norms in a layer."""

    OVERFLOWS_FLOAT16 = True
    norm_names = NormNames(
        post_attention_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm"
    )


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(ExpertsConfig):
    """Reads transformers' `Glm4MoeConfig`.

    Attributes:
        has_head_norms: True if queries and keys have norms.
    """

    model_type = "glm4_moe"
    aliases = deepseek.ALIASES
    defaults = Defaults(
        num_kv_heads=8, max_length=131_072, partial=0.5, epsilon=1e-5, attention_bias=False
    )
    expert_defaults = replace(CORRECTED, count=128, width=1408, num_dense=(deepseek.FIRST_DENSE, 1))
    read_draft_heads = staticmethod(read_numbered_names)

    has_head_norms: bool

    @classmethod
    def read(cls, fields: Fields) -> Glm4MoeConfig:
        """Returns what the fields say."""
        return cls.from_fields(
            fields,
            has_head_norms=fields.flag("use_qk_norm", False),
        )


class Glm4Moe(Qwen3Moe, config=Glm4MoeConfig):
    """GLM-4.5 to 4.7 (Z.ai, 2025) rotate half of a head, and have the experts of DeepSeek-V3."""

    expert_names = DEEPSEEK_EXPERTS
    output_bias = False
    # The MTP heads of published files (GLM-4.5 and its Air), where config.json does not count them.
    ignored = (*Llama.ignored, "*layers.92.*", "*layers.46.*")

    @classmethod
    def make_head_norms(cls, config: Any, at: Scope) -> HeadNorms:
        """Returns the norms of queries and keys, which the config may ask for."""
        return attention.norms_of_heads(config, at) if config.has_head_norms else HeadNorms()


class Glm4MoeLiteConfig(deepseek.DeepseekV3Config):
    """Reads transformers' `Glm4MoeLiteConfig`."""

    model_type = "glm4_moe_lite"
    aliases = {"n_routed_experts": "num_local_experts", "qk_rope_head_dim": "head_dim"}
    defaults = Defaults(max_length=202_752, epsilon=1e-5)
    latent_defaults = LatentDefaults(query_rank=768, plain=192, value=256)
    expert_defaults = replace(
        CORRECTED,
        count=64,
        per_token=4,
        width=1536,
        factor=("routed_scaling_factor", 1.8),
        num_dense=("", 1),
        has_types=True,
    )


class Glm4MoeLite(deepseek.DeepseekV2, config=Glm4MoeLiteConfig):
    """GLM-4.7 Flash (Z.ai, 2026) has the layers of DeepSeek-V3 in another size."""

    # The MTP head of published files, where config.json does not count it.
    ignored = (*Llama.ignored, "*layers.47.*")


class GlmMoeDsaConfig(deepseek.DeepseekV32Config):
    """Reads transformers' `GlmMoeDsaConfig`.

    Which layers have an indexer of their own (`indexer_types`) does not matter where all positions
    are chosen.
    """

    model_type = "glm_moe_dsa"
    defaults = Defaults(max_length=202_752, epsilon=1e-5)
    latent_defaults = LatentDefaults(query_rank=2048, plain=192, value=256, has_indexer=True)
    expert_defaults = replace(deepseek.DeepseekV32Config.expert_defaults, groups=(1, 1))


class GlmMoeDsa(deepseek.DeepseekV2, config=GlmMoeDsaConfig):
    """GLM-5 to 5.2 (Z.ai, 2026) are DeepSeek-V3.2 in another size."""

    # The MTP head of published files, where config.json does not count it.
    ignored = (*Llama.ignored, deepseek.INDEXER, "*layers.78.*")
