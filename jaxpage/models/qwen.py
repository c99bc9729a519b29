"""Qwen 2 to 3.6 (Alibaba, 2024 to 2026), and models with the layers of Qwen 3.

Qwen 2 has biases on queries, keys and values; Qwen 3 has norms of queries and keys in their place.
Qwen2-MoE has one expert that takes all tokens, and Qwen3-MoE has none. MiMo-7B (Xiaomi, 2025) is
Qwen 2 with an MTP head. Mellum 2 and MiniMax-M2 are Qwen 3 with experts and windows, or with norms
over all heads. Three of four layers of Qwen3-Next, Qwen3.5 and 3.6 have a gated delta rule, which
keeps a state of constant size; in the others the projection to queries gives gates of the heads'
outputs as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flax import nnx

from jaxpage.layers import DeltaWidths, HeadNorms
from jaxpage.models.config import Fields, MtpNames, layer_windows, mtp_names, recurrent_fields
from jaxpage.models.config.expert_fields import ExpertDefaults
from jaxpage.models.config.fields import without_axes
from jaxpage.models.llama import Llama
from jaxpage.models.parts import ExpertNames, Gates, Scope, attention, norms, recurrences
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults, ExpertsConfig

MELLUM_THETA = {"full_attention": ("", 500_000.0), "sliding_attention": ("", 10_000.0)}
LINEAR = "linear_attention"
offset_norm = functools.partial(norms.rms_norm, offset=1.0)  # The stored scale is less 1.


class Qwen2Config(DecoderConfig):
    """Reads transformers' `Qwen2Config`."""

    model_type = "qwen2"
    defaults = Defaults(num_kv_heads=32, max_length=32768)

    @classmethod
    def read(cls, fields: Fields) -> Qwen2Config:
        """Returns what the fields say."""
        windows = layer_windows.windows_by_layer(fields)
        return cls.from_fields(fields, sliding_windows=windows, attention_bias=True)

    @classmethod
    def read_draft_heads(cls, fields: Fields) -> MtpNames | None:
        """Returns the names of the MTP heads of MiMo-7B; None if the config counts no heads."""
        if not mtp_names.counts_heads(fields):
            return None
        field, heads = "num_nextn_predict_layers", "model.mtp_layers."
        return MtpNames(
            fields.integer(field),
            field,
            (heads,),
            layer=f"{heads}0",
            projection=f"{heads}0.input_proj",
            embedding_norm=f"{heads}0.token_layernorm",
            hidden_norm=f"{heads}0.hidden_layernorm",
            output_norm=f"{heads}0.final_layernorm",
            hidden_first=True,
        )


class Qwen2(Llama, config=Qwen2Config):
    """Qwen2 and Qwen2.5 (Yang et al., 2024) are Llama with biases on queries, keys and values."""

    output_bias = False


class Qwen3Config(DecoderConfig):
    """Reads transformers' `Qwen3Config`.

    An absent `head_dim` is 128, whatever the width of the model.
    """

    model_type = "qwen3"
    defaults = Defaults(num_kv_heads=32, head_dim=128, max_length=32768, attention_bias=False)

    @classmethod
    def read(cls, fields: Fields) -> Qwen3Config:
        """Returns what the fields say."""
        return cls.from_fields(fields, sliding_windows=layer_windows.windows_by_layer(fields))


class Qwen3(Llama, config=Qwen3Config):
    """Qwen3, dense (Yang et al., 2025), has norms of queries and keys in place of biases."""

    make_head_norms: ClassVar[Callable[..., HeadNorms]] = staticmethod(attention.norms_of_heads)


class Qwen2MoeConfig(ExpertsConfig):
    """Reads transformers' `Qwen2MoeConfig`."""

    model_type = "qwen2_moe"
    defaults = Defaults(num_kv_heads=16, max_length=32768)
    expert_defaults = ExpertDefaults(
        count=60,
        per_token=4,
        width=1408,
        shared_width=("shared_expert_intermediate_size", 5632),
        has_step=True,
    )

    @classmethod
    def read(cls, fields: Fields) -> Qwen2MoeConfig:
        """Returns what the fields say."""
        fields.refuse_true("use_sliding_window", " for this family")
        return cls.from_fields(fields, attention_bias=fields.flag("qkv_bias", True))


class Qwen2Moe(Qwen2, config=Qwen2MoeConfig):
    """Qwen2 with experts (Yang et al., 2024) has one expert that takes all tokens."""


class Qwen3MoeConfig(ExpertsConfig):
    """Reads transformers' `Qwen3MoeConfig`.

    A window, where it is used, is the window of all layers.
    """

    model_type = "qwen3_moe"
    aliases = {"num_experts": "num_local_experts"}
    defaults = Defaults(num_kv_heads=4, max_length=32768, attention_bias=False)
    expert_defaults = ExpertDefaults(count=128, per_token=8, width=768, has_step=True)

    @classmethod
    def read(cls, fields: Fields) -> Qwen3MoeConfig:
        """Returns what the fields say."""
        window = None
        if fields.flag("use_sliding_window", False):
            window = fields.optional_integer("sliding_window", 4096)
        return cls.from_fields(fields, sliding_windows=window)


class Qwen3Moe(Qwen3, config=Qwen3MoeConfig):
    """Qwen3 with experts (Yang et al., 2025) has experts in the layers that its config names."""


class Qwen3VLMoeText(Qwen3Moe):
    """Qwen3-VL with experts, text (2025), is Qwen3 with experts whose files have them stacked."""

    expert_names = ExpertNames(only_stacked=True, in_rows_too=True)


class MellumConfig(ExpertsConfig):
    """Reads transformers' `MellumConfig`."""

    model_type = "mellum"
    aliases = {"num_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"}
    defaults = Defaults(num_kv_heads=4, attention_bias=False)
    expert_defaults = ExpertDefaults(
        count=64, per_token=8, width=896, normalized=("norm_topk_prob", True), has_types=True
    )
    read_draft_heads = staticmethod(mtp_names.unread_heads)

    @classmethod
    def read(cls, fields: Fields) -> MellumConfig:
        """Returns what the fields say."""
        layer_windows.refuse_rope_scaling(fields)
        fields.only(rope_theta=500_000.0)  # transformers does not read this field.
        head_dim = fields.integer("head_dim", 128)
        types = fields.layer_types(["full_attention"] * fields.integer("num_hidden_layers"))
        return cls.from_fields(
            fields,
            head_dim=head_dim,
            sliding_windows=layer_windows.read_windows(fields, types, 1024),
            **layer_windows.read_ropes(fields, types, head_dim, 131_072, MELLUM_THETA),
        )


class Mellum(Qwen3Moe, config=MellumConfig):
    """Mellum 2 (JetBrains, 2026) is Qwen3 with experts, and with sliding windows in some layers."""


class MiniMaxM2Config(ExpertsConfig):
    """Reads transformers' `MiniMaxM2Config`.

    Published files have `rotary_dim`, which is a width and not a share.
    """

    model_type = "minimax_m2"
    aliases = {"num_local_experts": "num_experts"}
    defaults = Defaults(num_kv_heads=8)
    expert_defaults = ExpertDefaults(
        count_field="num_local_experts",
        count=256,
        per_token=8,
        width_field="intermediate_size",
        width=1536,
        normalized=True,
        routing={"sigmoid": True, "corrected": True},
    )

    @classmethod
    def read(cls, fields: Fields) -> MiniMaxM2Config:
        """Returns what the fields say."""
        # Published configs name these, which transformers' class does not have.
        fields.only(use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid")
        fields.only(use_routing_bias=True, shared_intermediate_size=0)
        head_dim = fields.integer("head_dim", 128)
        max_length = fields.integer("max_position_embeddings", 196_608)
        rotary_dim = fields.optional_integer("rotary_dim", None)
        # `rope` takes a share, which times the width of a head gives this width again.
        share = 1.0 if rotary_dim is None else rotary_dim / head_dim
        return cls.from_fields(
            fields,
            head_dim=head_dim,
            rope=fields.rope(head_dim, max_length, theta=5_000_000.0, partial=share),
        )


class MiniMaxM2(Qwen3Moe, config=MiniMaxM2Config):
    """MiniMax-M2 (MiniMax, 2025) has experts in all layers, and norms over all heads together."""

    expert_names = ExpertNames(
        "block_sparse_moe",
        "w1",
        "w3",
        "w2",
        correction="e_score_correction_bias",
        in_memory=("mlp", "gate", "e_score_correction_bias"),
    )
    make_head_norms = staticmethod(attention.norms_over_all_heads)


@dataclass(frozen=True, kw_only=True)
class HybridConfig(DecoderConfig):
    """Holds what the configs of these families say.

    Attributes:
        recurrent: The widths of the delta rule in the layers of which `kv.states` has a state.
    """

    defaults = Defaults(
        num_kv_heads=2, head_dim=256, max_length=32768, partial=0.25, attention_bias=False
    )
    draft_field: ClassVar[str] = "mtp_num_hidden_layers"  # the number of MTP heads
    by_key_heads: ClassVar[bool] = False  # see `DeltaWidths.grouped`

    recurrent: DeltaWidths

    @classmethod
    def read(cls, fields: Fields) -> HybridConfig:
        """Returns what the fields say."""
        recurrent_fields.check_activation(fields)
        every = fields.integer("full_attention_interval", 4)
        types = layer_windows.layer_types(fields, every, other=LINEAR)
        delta = cls.read_delta(fields)
        return cls.from_fields(
            fields,
            kv={"states": tuple(delta.state if kind == LINEAR else None for kind in types)},
            recurrent=delta,
        )

    @classmethod
    def read_delta(cls, fields: Fields) -> DeltaWidths:
        """Returns the widths of the delta rule."""
        widths = DeltaWidths(
            key_heads=fields.integer("linear_num_key_heads", 16),
            value_heads=fields.integer("linear_num_value_heads", 32),
            key=fields.integer("linear_key_head_dim", 128),
            value=fields.integer("linear_value_head_dim", 128),
            kernel=fields.integer("linear_conv_kernel_dim", 4),
            grouped=cls.by_key_heads,
        )
        recurrent_fields.check_heads(fields, widths)
        return widths

    @classmethod
    def read_draft_heads(cls, fields: Fields) -> MtpNames:
        """Returns the names of MTP heads, which cannot be used with a token table of their own."""
        has_table = fields.flag("mtp_use_dedicated_embeddings", False)
        # A head has the tables of its model (`drafters.join`), and no place for one of its own.
        refusal = "mtp_use_dedicated_embeddings = true of config.json" if has_table else ""
        count = fields.integer(cls.draft_field, 1, minimum=0)
        return mtp_names.name_separate_heads(count, cls.draft_field, refusal)


class Qwen3_5Config(HybridConfig):
    """Reads transformers' `Qwen3_5TextConfig`."""

    model_type = "qwen3_5_text"
    defaults = replace(HybridConfig.defaults, num_kv_heads=4)

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config without the axes of positions."""
        return without_axes(config)


class Qwen3_5(Llama, config=Qwen3_5Config):
    """Qwen3.5 and 3.6, dense, text (Qwen Team, 2026), have a gated delta rule in 3 of 4 layers."""

    ignored = (*Llama.ignored, "model.visual.*")
    make_norm = staticmethod(offset_norm)

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer, with a gate for each channel of a head."""
        head_norms = attention.norms_of_heads(config, at, offset_norm)
        gates = Gates(config.kv.head_dim)
        return attention.grouped_query_attention(config, index, at, norms=head_norms, gates=gates)

    @classmethod
    def make_recurrence(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the delta rule of a layer."""
        at = layer / "linear_attn"
        width, delta = config.hidden_size, config.recurrent
        queries_to_gates = ("in_proj_qkv", delta.convolution_width), ("in_proj_z", delta.values)
        betas_and_steps = ("in_proj_b", delta.value_heads), ("in_proj_a", delta.value_heads)
        return recurrences.delta_net(
            config,
            delta,
            index,
            at,
            input=at.projection(width, *queries_to_gates, each=delta.parts),
            beta_step=at.projection(width, *betas_and_steps),
        )


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeConfig(HybridConfig, ExpertsConfig):
    """Reads transformers' `Qwen3_5MoeTextConfig`.

    All layers have experts, so there is no other inner width.
    """

    model_type = "qwen3_5_moe_text"
    expert_defaults = ExpertDefaults(
        count=256,
        per_token=8,
        width=512,
        normalized=True,
        shared_width=("shared_expert_intermediate_size", 512),
    )

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config without the axes of positions."""
        # Every layer has experts, but the field of dense layers has no default.
        return {"intermediate_size": 1, **without_axes(config)}


class Qwen3_5Moe(Qwen3_5, config=Qwen3_5MoeConfig):
    """Qwen3.5 and 3.6 with experts, text (Qwen Team, 2026), have one expert for all tokens."""


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(HybridConfig, ExpertsConfig):
    """Reads transformers' `Qwen3NextConfig`."""

    model_type = "qwen3_next"
    aliases = {"num_experts": "num_local_experts"}
    expert_defaults = replace(
        Qwen3_5MoeConfig.expert_defaults,
        count=512,
        per_token=10,
        normalized=("norm_topk_prob", True),
        has_step=True,
    )
    draft_field = "num_nextn_predict_layers"
    by_key_heads = True


class Qwen3Next(Qwen3_5Moe, config=Qwen3NextConfig):
    """Qwen3-Next (Qwen Team, 2025) is Qwen3.5 with experts, in another order of products."""

    @classmethod
    def make_recurrence(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the delta rule of a layer, whose projections go by key heads."""
        at = layer / "linear_attn"
        width, delta = config.hidden_size, config.recurrent
        return recurrences.delta_net(
            config,
            delta,
            index,
            at,
            input=at.projection(width, ("in_proj_qkvz", delta.convolution_width + delta.values)),
            beta_step=at.projection(width, ("in_proj_ba", 2 * delta.value_heads)),
        )
