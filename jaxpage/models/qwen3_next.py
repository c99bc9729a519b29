"""Qwen3-Next (Qwen Team, 2025), and Qwen3.5 and 3.6 (2026), each dense or with experts.

Three of four layers have a gated delta rule, which keeps a state of constant size. The others have
attention, where the projection to queries gives gates of the heads' outputs as well.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flax import nnx

from jaxpage.layers.delta_net import DeltaWidths
from jaxpage.layers.experts import ExpertsSpec
from jaxpage.models.config.delta_config import check_activation, check_heads
from jaxpage.models.config.experts import read_experts, sparse_layers
from jaxpage.models.config.fields import Fields, without_axes
from jaxpage.models.config.mtp_names import MtpNames, name_apart
from jaxpage.models.llama import Llama
from jaxpage.models.parts.attention import Gates, grouped_query_attention, norms_of_heads
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.experts import ExpertsConfig
from jaxpage.models.parts.norms import rms_norm
from jaxpage.models.parts.projection import projection
from jaxpage.models.parts.recurrences import delta_net
from jaxpage.models.parts.scope import Scope

FULL = "full_attention"
LINEAR = "linear_attention"
offset_norm = functools.partial(rms_norm, offset=1.0)  # The stored scale is less 1.


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
    def read_hybrid(cls, fields: Fields, **more: Any) -> HybridConfig:
        """Returns what the fields say; `more` are fields of the config that the family adds."""
        check_activation(fields)
        every = fields.integer("full_attention_interval", 4)
        numbers = range(1, 1 + fields.integer("num_hidden_layers"))
        types = fields.layer_types(
            [LINEAR if number % every else FULL for number in numbers], kinds=(FULL, LINEAR)
        )
        delta = cls.read_delta(fields)
        return cls.from_fields(
            fields,
            kv={"states": tuple(delta.state if kind == LINEAR else None for kind in types)},
            recurrent=delta,
            draft_heads=cls.read_draft_heads(fields),
            **more,
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
        check_heads(fields, widths)
        return widths

    @classmethod
    def read_draft_heads(cls, fields: Fields) -> MtpNames:
        """Returns the names of MTP heads, which cannot be used with a token table of their own."""
        has_table = fields.flag("mtp_use_dedicated_embeddings", False)
        refusal = "mtp_use_dedicated_embeddings = true of config.json" if has_table else ""
        count = fields.integer(cls.draft_field, 1, least=0)
        return name_apart(count, cls.draft_field, refusal)


class Qwen3_5Config(HybridConfig):
    """Reads transformers' `Qwen3_5TextConfig`."""

    model_type = "qwen3_5_text"
    defaults = replace(HybridConfig.defaults, num_kv_heads=4)

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config without the axes of positions."""
        return without_axes(config)

    @classmethod
    def read(cls, fields: Fields) -> HybridConfig:
        """Returns what the fields say."""
        return cls.read_hybrid(fields)


class Qwen3_5(Llama, config=Qwen3_5Config):
    """Qwen3.5 and 3.6, dense, text (Qwen Team, 2026), have a gated delta rule in 3 of 4 layers."""

    ignored = (*Llama.ignored, "model.visual.*")
    make_norm = staticmethod(offset_norm)

    @classmethod
    def make_mixer(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the delta rule of a layer that keeps a state, or its attention."""
        if config.kv.state_of(index) is not None:
            return cls.make_delta_net(config, index, layer / "linear_attn")
        return super().make_mixer(config, index, layer)

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer, with a gate for each channel of a head."""
        norms = norms_of_heads(config, at, offset_norm)
        gates = Gates(config.kv.head_dim)
        return grouped_query_attention(config, index, at, norms=norms, gates=gates)

    @classmethod
    def make_delta_net(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the delta rule of a layer."""
        width, delta = config.hidden_size, config.recurrent
        queries_to_gates = ("in_proj_qkv", delta.convolved), ("in_proj_z", delta.values)
        betas_and_steps = ("in_proj_b", delta.value_heads), ("in_proj_a", delta.value_heads)
        return delta_net(
            config,
            delta,
            index,
            at,
            input=projection(width, at, *queries_to_gates, each=delta.parts),
            beta_step=projection(width, at, *betas_and_steps),
        )


def hybrid_experts(fields: Fields, count: int, per_token: int, *, normalized: bool) -> ExpertsSpec:
    """Returns the experts, one of which takes all tokens; see `read_experts` for the defaults."""
    return read_experts(
        fields,
        count=("num_experts", count),
        per_token=per_token,
        width=("moe_intermediate_size", 512),
        normalized=normalized,
        shared_width=fields.integer("shared_expert_intermediate_size", 512),
    )


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeConfig(HybridConfig, ExpertsConfig):
    """Reads transformers' `Qwen3_5MoeTextConfig`.

    All layers have experts, so there is no other inner width.
    """

    model_type = "qwen3_5_moe_text"

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config without the axes of positions."""
        return {"intermediate_size": 1, **without_axes(config)}

    @classmethod
    def read(cls, fields: Fields) -> HybridConfig:
        """Returns what the fields say."""
        return cls.read_hybrid(
            fields,
            experts=hybrid_experts(fields, 256, 8, normalized=True),
        )


class Qwen3_5Moe(Qwen3_5, config=Qwen3_5MoeConfig):
    """Qwen3.5 and 3.6 with experts, text (Qwen Team, 2026), have one expert for all tokens."""


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(HybridConfig, ExpertsConfig):
    """Reads transformers' `Qwen3NextConfig`."""

    model_type = "qwen3_next"
    aliases = {"num_experts": "num_local_experts"}
    draft_field = "num_nextn_predict_layers"
    by_key_heads = True

    @classmethod
    def read(cls, fields: Fields) -> HybridConfig:
        """Returns what the fields say."""
        normalized = fields.flag("norm_topk_prob", True)
        return cls.read_hybrid(
            fields,
            experts=hybrid_experts(fields, 512, 10, normalized=normalized),
            sparse_layers=sparse_layers(fields),
        )


class Qwen3Next(Qwen3_5Moe, config=Qwen3NextConfig):
    """Qwen3-Next (Qwen Team, 2025) is Qwen3.5 with experts, in another order of products."""

    @classmethod
    def make_delta_net(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the delta rule of a layer, whose projections go by key heads."""
        width, delta = config.hidden_size, config.recurrent
        return delta_net(
            config,
            delta,
            index,
            at,
            input=projection(width, at, ("in_proj_qkvz", delta.convolved + delta.values)),
            beta_step=projection(width, at, ("in_proj_ba", 2 * delta.value_heads)),
        )
