"""OLMo 1 to 3 and OLMo Hybrid (Ai2, 2024 to 2026), OLMoE and FlexOlmo, which have experts.

OLMo 1 is Llama with LayerNorm. OLMo 2 has norms after both halves of a layer, and OLMo 3 windows as
well. OLMo Hybrid has a gated delta rule in three of four layers, with norms before it and before
the MLP; the others are those of OLMo 2. Its published models have no rotary embedding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpage.layers import NO_ROTATION, DeltaWidths, Rope
from jaxpage.models.config import ExpertDefaults, Fields, layer_windows, mtp_names, recurrent_fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts import Block, NormNames, Scope, attention, norms, recurrences
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults, ExpertsConfig

# In `Olmo3Config` too, `rope_theta` does not reach layers with windows.
OLMO3_THETA = {"full_attention": ("rope_theta", 500_000.0), "sliding_attention": ("", 500_000.0)}
FULL = "full_attention"
LINEAR = "linear_attention"


@dataclass(frozen=True, kw_only=True)
class OlmoConfig(DecoderConfig):
    """Reads transformers' `OlmoConfig`. The epsilon of its norms is no field.

    Attributes:
        clip_qkv: The limit of queries, keys and values; None for none.
    """

    model_type = "olmo"
    defaults = Defaults(epsilon=("", 1e-5), attention_bias=False)

    clip_qkv: float | None

    @classmethod
    def read(cls, fields: Fields) -> OlmoConfig:
        """Returns what the fields say."""
        return cls.from_fields(fields, clip_qkv=fields.optional_number("clip_qkv", None))


class Olmo(Llama, config=OlmoConfig):
    """OLMo 1 (Groeneveld et al., 2024) is Llama with LayerNorm that has neither scale nor bias."""

    make_norm = staticmethod(functools.partial(norms.layer_norm, affine=False))

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        return attention.grouped_query_attention(config, index, at, clip_qkv=config.clip_qkv)


class Olmo2Config(DecoderConfig):
    """Reads transformers' `Olmo2Config`."""

    model_type = "olmo2"
    defaults = Defaults(epsilon=1e-5, attention_bias=False)


class Olmo2(Llama, config=Olmo2Config):
    """OLMo 2 (OLMo et al., 2025) has norms after both halves of a layer, and none before them.

    Norms of queries and keys are over all heads together.
    """

    norm_names = NormNames(None, None, "post_attention_layernorm", "post_feedforward_layernorm")
    make_head_norms = staticmethod(attention.norms_over_all_heads)


class Olmo3Config(DecoderConfig):
    """Reads transformers' `Olmo3Config`."""

    model_type = "olmo3"
    defaults = Defaults(epsilon=1e-5, attention_bias=False)

    @classmethod
    def read(cls, fields: Fields) -> Olmo3Config:
        """Returns what the fields say."""
        head_dim = fields.head_dim()
        types = layer_windows.layer_types(fields, 4)
        return cls.from_fields(
            fields,
            head_dim=head_dim,
            sliding_windows=layer_windows.read_windows(fields, types, 4096),
            **layer_windows.read_ropes(fields, types, head_dim, 2048, OLMO3_THETA),
        )


class Olmo3(Olmo2, config=Olmo3Config):
    """OLMo 3 (Ai2, 2025) is OLMo 2 with a sliding window in three of four layers.

    The rotation of these layers is not scaled.
    """


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(ExpertsConfig):
    """Reads transformers' `OlmoeConfig`; for `clip_qkv` see `OlmoConfig`."""

    model_type = "olmoe"
    aliases = {"num_experts": "num_local_experts"}
    defaults = Defaults(max_length=4096, epsilon=1e-5, attention_bias=False)
    expert_defaults = ExpertDefaults(
        count=64, per_token=8, width_field="intermediate_size", width=2048
    )

    clip_qkv: float | None

    @classmethod
    def read(cls, fields: Fields) -> OlmoeConfig:
        """Returns what the fields say."""
        return cls.from_fields(fields, clip_qkv=fields.optional_number("clip_qkv", None))


class Olmoe(Llama, config=OlmoeConfig):
    """OLMoE (Muennighoff et al., 2024) has experts and norms of queries and keys over all heads."""

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        head_norms = attention.norms_over_all_heads(config, at)
        return attention.grouped_query_attention(
            config, index, at, norms=head_norms, clip_qkv=config.clip_qkv
        )


class FlexOlmoConfig(ExpertsConfig):
    """Reads transformers' `FlexOlmoConfig`."""

    model_type = "flex_olmo"
    aliases = {"num_experts": "num_local_experts"}
    defaults = Defaults(max_length=4096, theta=500_000.0, attention_bias=False)
    expert_defaults = ExpertDefaults(
        count=7, per_token=5, width_field="intermediate_size", width=11008
    )


class FlexOlmo(Olmo2, config=FlexOlmoConfig):
    """FlexOlmo (Shi et al., 2025) has the layers of OLMo 2 and the experts of OLMoE."""


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(DecoderConfig):
    """Reads transformers' `OlmoHybridConfig`.

    Attributes:
        recurrent: The widths of the delta rule in the layers of which `kv.states` has a state.
    """

    model_type = "olmo_hybrid"
    defaults = Defaults(attention_bias=False)
    read_draft_heads = staticmethod(mtp_names.unread_heads)

    recurrent: DeltaWidths

    @classmethod
    def read(cls, fields: Fields) -> OlmoHybridConfig:
        """Returns what the fields say."""
        recurrent_fields.check_activation(fields)
        types = _layer_types(fields)
        delta = _read_delta(fields)
        head_dim = fields.head_dim()
        rope, max_length = _read_rope(fields, head_dim)
        return cls.from_fields(
            fields,
            head_dim=head_dim,
            kv={"states": tuple(delta.state if kind == LINEAR else None for kind in types)},
            rope=(rope, max_length),
            recurrent=delta,
        )


def _layer_types(fields: Fields) -> tuple[str, ...]:
    """Returns the kinds of the layers.

    By default every fourth has attention. If there are fewer than four, the last one has.
    """
    numbers = range(1, fields.integer("num_hidden_layers") + 1)
    usual = [LINEAR if number % 4 else FULL for number in numbers]
    if FULL not in usual:
        usual[-1] = FULL
    return fields.layer_types(usual, kinds=(FULL, LINEAR))


def _read_delta(fields: Fields) -> DeltaWidths:
    heads = fields.integer("num_attention_heads")
    key_heads = fields.optional_integer("linear_num_key_heads", None) or heads
    share = int(0.75 * fields.integer("hidden_size") / key_heads)
    key = fields.optional_integer("linear_key_head_dim", None) or share
    widths = DeltaWidths(
        key_heads=key_heads,
        value_heads=fields.optional_integer("linear_num_value_heads", None) or heads,
        key=key,
        value=fields.optional_integer("linear_value_head_dim", None) or 2 * key,
        kernel=fields.integer("linear_conv_kernel_dim", 4),
        separate=True,
        beta_factor=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
        epsilon=1e-5,
    )
    recurrent_fields.check_heads(fields, widths)
    return widths


def _read_rope(fields: Fields, head_dim: int) -> tuple[Rope, int]:
    """Returns the rotary embedding and its number of positions.

    There is no rotary embedding if `rope_theta` is null.
    """
    max_length = fields.integer("max_position_embeddings", 65_536)
    rope = fields.get("rope_scaling", None) or fields.get("rope_parameters", None) or {}
    theta = fields.get("rope_theta", 10_000.0)
    if isinstance(rope, dict):
        theta = rope.get("rope_theta", theta)
    return (NO_ROTATION, max_length) if theta is None else fields.rope(head_dim, max_length)


class OlmoHybrid(Olmo2, config=OlmoHybridConfig):
    """OLMo Hybrid (Ai2, 2026) is OLMo 2 with a gated delta rule in three of four layers."""

    # Older files, and those that transformers saves, have the second names.
    renamed = {
        "input_layernorm": "attention_layer_norm",
        "post_attention_layernorm": "feedforward_layer_norm",
    }

    @classmethod
    def make_block(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns a layer, which is that of OLMo 2 where it keeps no state."""
        if config.kv.state_of(index) is None:
            return super().make_block(config, index, layer)
        return Block(
            attention_norm=norms.rms_norm(config, layer / "input_layernorm"),
            attention=recurrences.delta_net_of_tensors(
                config, config.recurrent, index, layer / "linear_attn"
            ),
            mlp_norm=norms.rms_norm(config, layer / "post_attention_layernorm"),
            mlp=cls.make_mlp(config, index, layer),
        )
