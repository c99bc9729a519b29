"""DeepSeek-V2 to V3.2 (DeepSeek-AI, 2024 and 2025), and models like them.

Attention keeps a latent for each token in place of keys and values, and some of the experts take
all tokens. V3 chooses experts by sigmoids with corrections, where V2 has a softmax. V3.2 adds an
indexer, which is not read: it matters in longer sequences than are taken. A.X K1 and Youtu-LLM have
such layers, and so have GLM-4.7 Flash and GLM-5 (`glm.py`) and Mistral 4 (`mistral.py`). dots.llm1
and Solar Open have the experts alone. Kimi Linear has both (`kimi.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from jaxpage.models.config import Fields, expert_fields, layer_windows, mtp_names
from jaxpage.models.config.fields import REQUIRED
from jaxpage.models.llama import Llama
from jaxpage.models.parts import Scope, latent
from jaxpage.models.parts.decoder_config import Defaults, ExpertsConfig
from jaxpage.models.parts.latent import LatentSpec
from jaxpage.models.parts.names import DEEPSEEK_EXPERTS
from jaxpage.models.qwen import Qwen3Moe

ALIASES = {
    "n_routed_experts": "num_local_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
}
NORM_AFTER_EXPERTS = "post_mlp_layernorm"
INDEXER = "*.self_attn.indexer.*"  # It chooses all positions; see `read_indexed_decoder`.


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(ExpertsConfig):
    """Reads transformers' `DeepseekV2Config`.

    Attributes:
        latent: The latent attention.
    """

    model_type = "deepseek_v2"
    aliases = {"n_routed_experts": "num_experts"}
    defaults = Defaults(mlp_bias=False)

    latent: LatentSpec

    @classmethod
    def read(cls, fields: Fields) -> DeepseekV2Config:
        """Returns what the fields say."""
        fields.refuse_true("norm_topk_prob", " for this family")
        method = fields.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            text = f"topk_method = {method!r} is not greedy or group_limited_greedy"
            fields.note_unsupported(text, topk_method="greedy")
            method = "greedy"
        count = ("n_routed_experts", 64)
        width = ("moe_intermediate_size", 1407)
        groups = None if method == "greedy" else expert_fields.read_groups(fields, count, best=1)
        factor = fields.number("routed_scaling_factor", 1.0)
        return cls.from_fields(
            fields,
            **latent.read_latent_decoder(fields, max_length=2048, query_rank=1536),
            experts=expert_fields.read_experts(
                fields,
                count=count,
                per_token=None,
                width=width,
                normalized=False,
                routing={"groups": groups, "factor": factor},
                shared_width=fields.integer(*width) * fields.integer("n_shared_experts", 2),
            ),
            sparse_layers=expert_fields.first_dense(fields, 0),
            draft_heads=mtp_names.read_numbered_names(fields),
        )


class DeepseekV2(Llama, config=DeepseekV2Config):
    """DeepSeek-V2 (DeepSeek-AI, 2024) has latent attention, and experts."""

    expert_names = DEEPSEEK_EXPERTS

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        return latent.latent_attention(config, config.latent, index, at)


class DeepseekV3Config(DeepseekV2Config):
    """Reads transformers' `DeepseekV3Config`."""

    model_type = "deepseek_v3"
    aliases = ALIASES
    defaults = Defaults()

    @classmethod
    def read(cls, fields: Fields) -> DeepseekV3Config:
        """Returns what the fields say."""
        return cls.from_fields(
            fields,
            **latent.read_latent_decoder(fields, max_length=4096, query_rank=1536),
            experts=expert_fields.read_corrected_experts(
                fields, count=256, per_token=8, width=2048, groups=(8, 4), factor=2.5
            ),
            sparse_layers=expert_fields.first_dense(fields, 3),
            draft_heads=mtp_names.read_numbered_names(fields),
        )


class DeepseekV3(DeepseekV2, config=DeepseekV3Config):
    """DeepSeek-V3 and R1 (DeepSeek-AI, 2024) have latent attention, and experts in groups."""

    # The MTP head of published files, where config.json does not count it.
    ignored = (*Llama.ignored, "*layers.61.*")


class DeepseekV32Config(DeepseekV2Config):
    """Reads transformers' `DeepseekV32Config`."""

    model_type = "deepseek_v32"
    aliases = {"n_routed_experts": "num_local_experts"}
    defaults = Defaults()

    @classmethod
    def read(cls, fields: Fields) -> DeepseekV32Config:
        """Returns what the fields say."""
        return cls.from_fields(
            fields,
            **latent.read_indexed_decoder(fields, max_length=163_840, query_rank=1536),
            experts=expert_fields.read_corrected_experts(
                fields, count=256, per_token=8, width=2048, groups=(8, 4), factor=2.5
            ),
            sparse_layers=expert_fields.sparse_by_type(
                fields, expert_fields.first_dense(fields, 3)
            ),
            draft_heads=mtp_names.read_numbered_names(fields, INDEXER),
        )


class DeepseekV32(DeepseekV3, config=DeepseekV32Config):
    """DeepSeek-V3.2 (DeepSeek-AI, 2025) is V3, up to as many tokens as its indexer chooses."""

    ignored = (*DeepseekV3.ignored, INDEXER)


class YoutuConfig(DeepseekV2Config):
    """Reads transformers' `YoutuConfig`."""

    model_type = "youtu"
    aliases = {}
    defaults = Defaults(tied=True)

    @classmethod
    def read(cls, fields: Fields) -> YoutuConfig:
        """Returns what the fields say."""
        return cls.from_fields(
            fields,
            **latent.read_latent_decoder(fields, max_length=131_072, query_rank=1536),
            experts=None,
            sparse_layers=(False,) * fields.integer("num_hidden_layers"),
        )


class Youtu(DeepseekV2, config=YoutuConfig):
    """Youtu-LLM (Tencent, 2025) has the latent attention of DeepSeek-V3, and no experts."""


class AXK1Config(DeepseekV2Config):
    """Reads transformers' `AXK1Config`.

    The router has a correction bias only if `topk_method` is `noaux_tc` or absent. transformers
    does not read this field: where files have no bias, it takes zeros.
    """

    model_type = "axk1"
    aliases = {"n_routed_experts": "num_local_experts"}
    defaults = Defaults()

    @classmethod
    def read(cls, fields: Fields) -> AXK1Config:
        """Returns what the fields say."""
        heads = mtp_names.read_numbered_names(fields)
        return cls.from_fields(
            fields,
            **latent.read_latent_decoder(fields, max_length=32_768, query_rank=1536),
            experts=expert_fields.read_corrected_experts(
                fields,
                count=192,
                per_token=8,
                width=2048,
                groups=(8, 4),
                factor=2.5,
                corrected=fields.get("topk_method", "noaux_tc") == "noaux_tc",
            ),
            sparse_layers=expert_fields.sparse_by_type(
                fields, expert_fields.first_dense(fields, 1)
            ),
            draft_heads=heads and replace(heads, refusal="heads of A.X K1 are not read"),
        )


class AXK1(DeepseekV2, config=AXK1Config):
    """A.X K1 (SK Telecom, 2025) is DeepSeek-V3 with a norm after the experts of a layer."""

    # Published files have this norm in all layers; transformers uses it only after experts.
    ignored = (*Llama.ignored, f"*.{NORM_AFTER_EXPERTS}.weight")
    # The name that transformers has in memory.
    renamed = {f".{NORM_AFTER_EXPERTS}": f".mlp.{NORM_AFTER_EXPERTS}"}

    @classmethod
    def make_norms(cls, config: Any, index: int, layer: Scope) -> dict[str, Any]:
        """Returns the norms of a layer, with one after the experts if it has any."""
        norms = super().make_norms(config, index, layer)
        if config.experts_of(index) is not None:
            norms["post_mlp_norm"] = cls.make_norm(config, layer / NORM_AFTER_EXPERTS)
        return norms


class Dots1Config(ExpertsConfig):
    """Reads transformers' `Dots1Config`."""

    model_type = "dots1"
    aliases = {"n_routed_experts": "num_local_experts"}
    defaults = Defaults(num_kv_heads=32, attention_bias=False)

    @classmethod
    def read(cls, fields: Fields) -> Dots1Config:
        """Returns what the fields say."""
        window = fields.optional_integer("sliding_window", 4096)
        first = fields.integer("max_window_layers", 62, minimum=0)
        types = [
            "sliding_attention" if window and index >= first else "full_attention"
            for index in range(fields.integer("num_hidden_layers"))
        ]
        return cls.from_fields(
            fields,
            sliding_windows=layer_windows.windows_of(fields, fields.layer_types(types), window),
            experts=expert_fields.read_corrected_experts(
                fields,
                count=REQUIRED,
                per_token=REQUIRED,
                width=1408,
                normalized=False,
                shared=("n_shared_experts", REQUIRED),
            ),
            sparse_layers=expert_fields.first_dense(fields, 0),
        )


class Dots1(Qwen3Moe, config=Dots1Config):
    """dots.llm1 (rednote, 2025) has the attention of Qwen3 and the experts of DeepSeek-V3."""

    expert_names = DEEPSEEK_EXPERTS


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
        experts = expert_fields.read_corrected_experts(fields, count=128, per_token=8, width=1280)
        return cls.from_fields(
            fields,
            intermediate_size=experts.width,  # No layer is dense.
            experts=experts,
        )


class SolarOpen(Llama, config=SolarOpenConfig):
    """Solar Open (Upstage, 2025) is Llama with the experts of DeepSeek-V3 in all layers."""

    expert_names = DEEPSEEK_EXPERTS
    output_bias = False
