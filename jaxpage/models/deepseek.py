"""DeepSeek-V2 to V3.2 (DeepSeek-AI, 2024 and 2025), and models like them.

Attention keeps a latent for each token in place of keys and values, and some of the experts take
all tokens. V3 chooses experts by sigmoids with corrections, where V2 has a softmax. V3.2 adds an
indexer, which is not read: it matters in longer sequences than are taken. A.X K1 and Youtu-LLM have
such layers, and so have GLM-4.7 Flash and GLM-5 (`glm.py`) and Mistral 4 (`mistral.py`). dots.llm1
and Solar Open have the experts alone. Kimi Linear has latents in every fourth layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from jaxpage.layers.delta_net import ChannelProducts, DeltaWidths
from jaxpage.models.config.config_fields import RefusedField, WrongField
from jaxpage.models.config.experts import (
    first_dense,
    read_corrected_experts,
    read_experts,
    read_groups,
    sparse_by_type,
)
from jaxpage.models.config.fields import REQUIRED, Fields
from jaxpage.models.config.layer_windows import windows_of
from jaxpage.models.config.mtp_names import read_numbered_names
from jaxpage.models.config.recurrent_fields import check_activation
from jaxpage.models.llama import Llama
from jaxpage.models.parts.block import Block
from jaxpage.models.parts.decoder_config import Defaults
from jaxpage.models.parts.experts import DEEPSEEK_NAMES, ExpertNames, ExpertsConfig
from jaxpage.models.parts.latent import (
    LatentSpec,
    latent_attention,
    read_indexed_decoder,
    read_latent_decoder,
    read_widths,
)
from jaxpage.models.parts.norms import rms_norm
from jaxpage.models.parts.projection import projection
from jaxpage.models.parts.recurrences import delta_net
from jaxpage.models.parts.scope import Scope
from jaxpage.models.qwen import Qwen3Moe

ALIASES = {
    "n_routed_experts": "num_local_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
}
NORM_AFTER_EXPERTS = "post_mlp_layernorm"
INDEXER = "*.self_attn.indexer.*"  # It chooses all positions; see `read_indexed_decoder`.
FULL = "full_attention"
LINEAR = "linear_attention"
KIMI_EXPERTS = "block_sparse_moe"
KIMI_HALF = ("shared_experts", "gate_proj", "up_proj", "down_proj")
KIMI_DECAY = ("f_a_proj", "f_b_proj", "dt_bias", "A_log")
# Fields of `linear_attn_config` in published files, with their names in transformers' class.
KIMI_NESTED = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


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
        if fields.get("norm_topk_prob", False):
            error = RefusedField("norm_topk_prob = true is not supported for this family")
            fields.note(error, norm_topk_prob=False)
        method = fields.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            text = f"topk_method = {method!r} is not greedy or group_limited_greedy"
            fields.note(RefusedField(text), topk_method="greedy")
            method = "greedy"
        count = ("n_routed_experts", 64)
        width = ("moe_intermediate_size", 1407)
        groups = None if method == "greedy" else read_groups(fields, count, best=1)
        factor = fields.number("routed_scaling_factor", 1.0)
        return cls.from_fields(
            fields,
            **read_latent_decoder(fields, max_length=2048, query_rank=1536),
            experts=read_experts(
                fields,
                count=count,
                per_token=None,
                width=width,
                normalized=False,
                routing={"groups": groups, "factor": factor},
                shared_width=fields.integer(*width) * fields.integer("n_shared_experts", 2),
            ),
            sparse_layers=first_dense(fields, 0),
            draft_heads=read_numbered_names(fields),
        )


class DeepseekV2(Llama, config=DeepseekV2Config):
    """DeepSeek-V2 (DeepSeek-AI, 2024) has latent attention, and experts."""

    expert_names = DEEPSEEK_NAMES

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        return latent_attention(config, config.latent, index, at)


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
            **read_latent_decoder(fields, max_length=4096, query_rank=1536),
            experts=read_corrected_experts(
                fields, count=256, per_token=8, width=2048, groups=(8, 4), factor=2.5
            ),
            sparse_layers=first_dense(fields, 3),
            draft_heads=read_numbered_names(fields),
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
            **read_indexed_decoder(fields, max_length=163_840, query_rank=1536),
            experts=read_corrected_experts(
                fields, count=256, per_token=8, width=2048, groups=(8, 4), factor=2.5
            ),
            sparse_layers=sparse_by_type(fields, first_dense(fields, 3)),
            draft_heads=read_numbered_names(fields, INDEXER),
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
            **read_latent_decoder(fields, max_length=131_072, query_rank=1536),
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
        heads = read_numbered_names(fields)
        return cls.from_fields(
            fields,
            **read_latent_decoder(fields, max_length=32_768, query_rank=1536),
            experts=read_corrected_experts(
                fields,
                count=192,
                per_token=8,
                width=2048,
                groups=(8, 4),
                factor=2.5,
                corrected=fields.get("topk_method", "noaux_tc") == "noaux_tc",
            ),
            sparse_layers=sparse_by_type(fields, first_dense(fields, 1)),
            draft_heads=heads and replace(heads, refusal="heads of A.X K1 are not read"),
        )


class AXK1(DeepseekV2, config=AXK1Config):
    """A.X K1 (SK Telecom, 2025) is DeepSeek-V3 with a norm after the experts of a layer."""

    # Published files have this norm in all layers; transformers uses it only after experts.
    ignored = (*Llama.ignored, f"*.{NORM_AFTER_EXPERTS}.weight")
    # The name that transformers has in memory.
    renamed = {f".{NORM_AFTER_EXPERTS}": f".mlp.{NORM_AFTER_EXPERTS}"}

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns a layer."""
        has_norm = config.experts_of(index) is not None
        return Block(
            attention_norm=rms_norm(config, at / "input_layernorm"),
            attention=cls.make_attention(config, index, at / "self_attn"),
            mlp_norm=rms_norm(config, at / "post_attention_layernorm"),
            mlp=cls.make_mlp(config, index, at),
            post_mlp_norm=rms_norm(config, at / NORM_AFTER_EXPERTS) if has_norm else None,
        )


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
                normalized=False,
                shared=("n_shared_experts", REQUIRED),
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
        experts = read_corrected_experts(fields, count=128, per_token=8, width=1280)
        return cls.from_fields(
            fields,
            intermediate_size=experts.width,  # No layer is dense.
            experts=experts,
        )


class SolarOpen(Llama, config=SolarOpenConfig):
    """Solar Open (Upstage, 2025) is Llama with the experts of DeepSeek-V3 in all layers."""

    expert_names = DEEPSEEK_NAMES
    output_bias = False


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(ExpertsConfig):
    """Reads transformers' `KimiLinearConfig`.

    Attributes:
        latent: The latent attention.
        recurrent: The widths of the delta rule in the layers of which `kv.states` has a state.
    """

    model_type = "kimi_linear"
    aliases = {
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    }
    defaults = Defaults(max_length=1_048_576, has_rope=False, epsilon=1e-5)

    latent: LatentSpec
    recurrent: DeltaWidths

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config with what `linear_attn_config` says of the widths."""
        nested = config.get("linear_attn_config")
        nested = nested if isinstance(nested, dict) else {}
        return {
            **config,
            **{field: nested[name] for name, field in KIMI_NESTED.items() if name in nested},
        }

    @classmethod
    def read(cls, fields: Fields) -> KimiLinearConfig:
        """Returns what the fields say."""
        nested = fields.get("linear_attn_config", None)
        if nested is not None and not isinstance(nested, dict):
            text = f"linear_attn_config must be an object, not {nested!r}"
            fields.note(WrongField(text), linear_attn_config=None)
            nested = None
        check_activation(fields)
        _refuse(fields)
        types = _layer_types(fields, nested or {})
        delta = _read_delta(fields)
        widths = read_widths(fields, query_rank=None)
        return cls.from_fields(
            fields,
            num_kv_heads=1,
            head_dim=widths.kept,
            kv={
                "value_width": widths.rank,
                "states": tuple(delta.state if kind == LINEAR else None for kind in types),
            },
            latent=LatentSpec(widths, widths.query**-0.5, fields.flag("attention_bias", False)),
            recurrent=delta,
            experts=read_corrected_experts(
                fields,
                count=256,
                count_field="num_local_experts",
                per_token=8,
                width=1024,
                factor=2.446,
            ),
            sparse_layers=sparse_by_type(fields, first_dense(fields, 1)),
        )


def _refuse(fields: Fields) -> None:
    """Refuses values of published configs that transformers does not implement."""
    fields.only(
        mla_use_nope=True,
        moe_router_activation_func="sigmoid",
        use_grouped_topk=True,
        moe_layer_freq=1,
    )
    if fields.flag("tie_word_embeddings", False):
        text = (
            "tie_word_embeddings = true is not supported for this family: transformers ignores it"
        )
        fields.note(RefusedField(text), tie_word_embeddings=False)


def _layer_types(fields: Fields, nested: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the kinds of the layers, which published files number from 1."""
    numbers = range(1, fields.integer("num_hidden_layers") + 1)
    usual = [FULL if number > 1 and number % 4 == 1 else LINEAR for number in numbers]
    lists = [nested.get(name) for name in ("full_attn_layers", "kda_layers")]
    if fields.get("layer_types", None) is None and None not in lists:
        named = {
            number: kind
            for kind, each in zip((FULL, LINEAR), lists, strict=True)
            for number in (each if isinstance(each, list) else [])
        }
        if named.keys() != {*numbers}:
            text = f"linear_attn_config must name each of {len(numbers)} layers, not {lists!r}"
            fields.note(WrongField(text), linear_attn_config=None)
        usual = [named.get(number, LINEAR) for number in numbers]
    return fields.layer_types(usual, kinds=(FULL, LINEAR))


def _read_delta(fields: Fields) -> DeltaWidths:
    heads = fields.integer("linear_num_heads", 32)
    width = fields.integer("linear_head_dim", 128)
    return DeltaWidths(
        key_heads=heads,
        value_heads=heads,
        key=width,
        value=width,
        kernel=fields.integer("linear_conv_kernel_dim", 4),
        apart=True,
        by_channel=True,
    )


class KimiLinear(Llama, config=KimiLinearConfig):
    """Kimi Linear (Moonshot AI, 2025) has a gated delta rule with a decay for each channel of keys.

    Every fourth layer has the latent attention of DeepSeek-V3 without rotary embedding.
    """

    renamed = {
        # When transformers saves a model, it renames these in all layers, also in dense ones.
        **{f".mlp.{part}": f".{KIMI_EXPERTS}.{part}" for part in KIMI_HALF},
        # These are the names that transformers has in memory.
        **{f".self_attn.{part}": f".self_attn.forget_gate.{part}" for part in KIMI_DECAY},
    }
    expert_names = ExpertNames(KIMI_EXPERTS, "w1", "w3", "w2", shared=("shared_experts", None))

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the latent attention of a layer."""
        return latent_attention(config, config.latent, index, at)

    @classmethod
    def make_recurrence(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the delta rule of a layer."""
        at = layer / "self_attn"
        width, delta = config.hidden_size, config.recurrent
        rank = delta.key  # the width between the two projections in a row
        inner, outer = ("embed", None), (None, "heads")
        return delta_net(
            config,
            delta,
            index,
            at,
            input=projection(
                width, at, ("q_proj", delta.keys), ("k_proj", delta.keys), ("v_proj", delta.values)
            ),
            beta_step=projection(width, at, ("b_proj", delta.value_heads)),
            norm="o_norm",
            output="o_proj",
            channels=ChannelProducts(
                projection(width, at, ("f_a_proj", rank), ("g_a_proj", rank), axes=inner),
                projection(rank, at, ("f_b_proj", delta.keys), axes=outer),
                projection(rank, at, ("g_b_proj", delta.values), axes=outer),
            ),
        )
