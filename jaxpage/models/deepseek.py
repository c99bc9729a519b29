"""DeepSeek-V2 to V3.2 (DeepSeek-AI, 2024 and 2025), and models like them.

Attention keeps a latent for each token in place of keys and values, and some of the experts take
all tokens. V3 chooses experts by sigmoids with corrections, where V2 has a softmax. V3.2 adds an
indexer, which is not read: it matters in longer sequences than are taken. A.X K1 and Youtu-LLM have
such layers, and so have GLM-4.7 Flash and GLM-5 (`glm.py`) and Mistral 4 (`mistral.py`). dots.llm1
and Solar Open have the experts alone. Kimi Linear has both (`kimi.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from flax import nnx

from jaxpage.models.config import REQUIRED, Fields, expert_fields, layer_windows
from jaxpage.models.config.expert_fields import CORRECTED, ExpertDefaults
from jaxpage.models.config.mtp_names import MtpNames, no_heads, read_numbered_names
from jaxpage.models.llama import Llama
from jaxpage.models.parts import DEEPSEEK_EXPERTS, Defaults, ExpertsConfig, Scope, latent
from jaxpage.models.parts.latent import LatentDefaults, LatentSpec
from jaxpage.models.qwen import Qwen3Moe

_Config = TypeVar("_Config", bound="DeepseekV2Config")

ALIASES = {
    "n_routed_experts": "num_local_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
}
FIRST_DENSE = "first_k_dense_replace"
NORM_AFTER_EXPERTS = "post_mlp_layernorm"
INDEXER = "*.self_attn.indexer.*"  # It chooses all positions; see `LatentDefaults.read_indexed`.


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(ExpertsConfig):
    """Reads transformers' `DeepseekV2Config`.

    Attributes:
        latent: The latent attention.
    """

    model_type = "deepseek_v2"
    aliases = {"n_routed_experts": "num_experts"}
    defaults = Defaults(mlp_bias=False)
    latent_defaults: ClassVar[LatentDefaults] = LatentDefaults(query_rank=1536)
    expert_defaults = ExpertDefaults(
        count_field="n_routed_experts",
        count=64,
        per_token=REQUIRED,
        # This is the default of transformers' class, which no published file has.
        width=1407,
        normalized=False,
        shared_count=("n_shared_experts", 2),
        factor=("routed_scaling_factor", 1.0),
        num_dense=(FIRST_DENSE, 0),
    )
    read_draft_heads: ClassVar[Callable[..., MtpNames | None]] = staticmethod(read_numbered_names)

    latent: LatentSpec

    @classmethod
    def from_fields(cls: type[_Config], fields: Fields, **options: Any) -> _Config:
        """Returns the config, with the latent attention that its fields say."""
        latents = cls.latent_defaults.read(fields, cls.defaults.max_length)
        return super().from_fields(fields, **latents, **options)

    @classmethod
    def read(cls, fields: Fields) -> DeepseekV2Config:
        """Returns what the fields say."""
        fields.refuse_true("norm_topk_prob", " for this family")
        method = fields.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            text = f"topk_method = {method!r} is not greedy or group_limited_greedy"
            fields.note_unsupported(text, topk_method="greedy")
            method = "greedy"
        groups = None
        if method == "group_limited_greedy":
            # V2 rates a group by its best expert, V3 by the sum of its best two.
            groups = expert_fields.read_groups(fields, ("n_routed_experts", 64), best=1)
        experts = cls.expert_defaults.read(fields, routing={"groups": groups})
        return cls.from_fields(fields, experts=experts)


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
    defaults = Defaults(max_length=4096)
    expert_defaults = replace(
        CORRECTED,
        groups=(8, 4),
        factor=("routed_scaling_factor", 2.5),
        num_dense=(FIRST_DENSE, 3),
    )

    @classmethod
    def read(cls, fields: Fields) -> DeepseekV2Config:
        """Returns what the fields say."""
        return cls.from_fields(fields)


class DeepseekV3(DeepseekV2, config=DeepseekV3Config):
    """DeepSeek-V3 and R1 (DeepSeek-AI, 2024) have latent attention, and experts in groups."""

    # The MTP head of published files, where config.json does not count it.
    ignored = (*Llama.ignored, "*layers.61.*")


class DeepseekV32Config(DeepseekV3Config):
    """Reads transformers' `DeepseekV32Config`."""

    model_type = "deepseek_v32"
    aliases = {"n_routed_experts": "num_local_experts"}
    defaults = Defaults(max_length=163_840)
    latent_defaults = LatentDefaults(query_rank=1536, has_indexer=True)
    expert_defaults = replace(DeepseekV3Config.expert_defaults, has_types=True)

    @classmethod
    def read_draft_heads(cls, fields: Fields) -> MtpNames | None:
        """Returns the names of MTP heads, of whose layers the indexer is not read."""
        return read_numbered_names(fields, INDEXER)


class DeepseekV32(DeepseekV3, config=DeepseekV32Config):
    """DeepSeek-V3.2 (DeepSeek-AI, 2025) is V3, up to as many tokens as its indexer chooses."""

    ignored = (*DeepseekV3.ignored, INDEXER)


class YoutuConfig(DeepseekV2Config):
    """Reads transformers' `YoutuConfig`."""

    model_type = "youtu"
    aliases = {}
    defaults = Defaults(max_length=131_072, tied=True)
    read_draft_heads = staticmethod(no_heads)

    @classmethod
    def read(cls, fields: Fields) -> DeepseekV2Config:
        """Returns what the fields say."""
        no_layers = (False,) * fields.integer("num_hidden_layers")
        return cls.from_fields(fields, experts=None, sparse_layers=no_layers)


class Youtu(DeepseekV2, config=YoutuConfig):
    """Youtu-LLM (Tencent, 2025) has the latent attention of DeepSeek-V3, and no experts."""


class AXK1Config(DeepseekV3Config):
    """Reads transformers' `AXK1Config`.

    The router has a correction bias only if `topk_method` is `noaux_tc` or absent. transformers
    does not read this field: where files have no bias, it takes zeros.
    """

    model_type = "axk1"
    aliases = {"n_routed_experts": "num_local_experts"}
    defaults = Defaults(max_length=32_768)
    expert_defaults = replace(
        DeepseekV3Config.expert_defaults, count=192, num_dense=(FIRST_DENSE, 1), has_types=True
    )

    @classmethod
    def read(cls, fields: Fields) -> DeepseekV2Config:
        """Returns what the fields say."""
        corrected = fields.get("topk_method", "noaux_tc") == "noaux_tc"
        experts = cls.expert_defaults.read(fields, routing={"corrected": corrected})
        return cls.from_fields(fields, experts=experts)

    @classmethod
    def read_draft_heads(cls, fields: Fields) -> MtpNames | None:
        """Returns the names of MTP heads, which no method can use."""
        heads = read_numbered_names(fields)
        return heads and replace(heads, refusal="heads of A.X K1 are not read")


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
    expert_defaults = replace(
        CORRECTED,
        count=REQUIRED,
        per_token=REQUIRED,
        width=1408,
        normalized=("norm_topk_prob", False),
        shared_count=("n_shared_experts", REQUIRED),
        num_dense=(FIRST_DENSE, 0),
    )

    @classmethod
    def read(cls, fields: Fields) -> Dots1Config:
        """Returns what the fields say."""
        windows = layer_windows.windows_by_layer(fields, 62, has_switch=False)
        return cls.from_fields(fields, sliding_windows=windows)


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
    expert_defaults = replace(CORRECTED, count=128, width=1280)

    @classmethod
    def read(cls, fields: Fields) -> SolarOpenConfig:
        """Returns what the fields say."""
        # Published files have these fields; transformers' class does not.
        fields.only(first_k_dense_replace=0, use_qk_norm=False)
        experts = cls.expert_defaults.read(fields)
        # No layer is dense, and so the file need not say how wide one would be.
        return cls.from_fields(fields, intermediate_size=experts.width, experts=experts)


class SolarOpen(Llama, config=SolarOpenConfig):
    """Solar Open (Upstage, 2025) is Llama with the experts of DeepSeek-V3 in all layers."""

    expert_names = DEEPSEEK_EXPERTS
    output_bias = False
