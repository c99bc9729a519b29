"""Kimi Linear (Moonshot AI, 2025) has linear attention in three layers of four.

    layer          0       1         2         3         4         5         6         7
    attention      delta   delta     delta     latent    delta     delta     delta     latent
    feed-forward   dense   experts   experts   experts   experts   experts   experts   experts

Layers of linear attention keep a state by the gated delta rule, in which each channel of a key has
its own decay. The others have the latent attention of DeepSeek-V3, and experts are chosen as there
(`deepseek.py`). No layer rotates. Kimi K2 is DeepSeek-V3 in everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from jaxpage.layers import DeltaWidths
from jaxpage.layers.delta_net import ChannelMatmuls
from jaxpage.models.config import CORRECTED, Fields, recurrent_fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts import Defaults, ExpertNames, ExpertsConfig, Scope, latent, recurrences
from jaxpage.models.parts.latent import LatentDefaults, LatentSpec

FULL = "full_attention"
LINEAR = "linear_attention"
EXPERTS = "block_sparse_moe"
# Modules of the feed-forward half, and parameters of the decay, that transformers renames.
FEED_FORWARD = ("shared_experts", "gate_proj", "up_proj", "down_proj")
DECAY = ("f_a_proj", "f_b_proj", "dt_bias", "A_log")
# Fields of `linear_attn_config` in published files, with their names in transformers' class.
WIDTHS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


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
    expert_defaults = replace(
        CORRECTED,
        count_field="num_local_experts",
        width=1024,
        factor=("routed_scaling_factor", 2.446),
        num_dense=("first_k_dense_replace", 1),
        has_types=True,
    )

    latent: LatentSpec
    recurrent: DeltaWidths

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config with what `linear_attn_config` says of the widths."""
        nested = config.get("linear_attn_config")
        nested = nested if isinstance(nested, dict) else {}
        return {
            **config,
            **{field: nested[name] for name, field in WIDTHS.items() if name in nested},
        }

    @classmethod
    def read(cls, fields: Fields) -> KimiLinearConfig:
        """Returns what the fields say."""
        nested = fields.get("linear_attn_config", None)
        if nested is not None and not isinstance(nested, dict):
            text = f"linear_attn_config must be an object, not {nested!r}"
            fields.note_wrong(text, linear_attn_config=None)
            nested = None
        recurrent_fields.check_activation(fields)
        _refuse_unsupported(fields)
        types = _layer_types(fields, nested or {})
        delta = _read_delta(fields)
        widths = LatentDefaults(query_rank=None).read_widths(fields)
        return cls.from_fields(
            fields,
            # Multi-head latent attention keeps one latent per token, which all heads share.
            num_kv_heads=1,
            head_dim=widths.cached,
            kv={
                "value_width": widths.rank,
                "states": tuple(delta.state if kind == LINEAR else None for kind in types),
            },
            latent=LatentSpec(widths, widths.query**-0.5, fields.flag("attention_bias", False)),
            recurrent=delta,
        )


def _refuse_unsupported(fields: Fields) -> None:
    """Refuses values of published configs that transformers does not implement."""
    fields.only(
        mla_use_nope=True,
        moe_router_activation_func="sigmoid",
        use_grouped_topk=True,
        moe_layer_freq=1,
    )
    fields.refuse_true("tie_word_embeddings", " for this family: transformers ignores it")


def _layer_types(fields: Fields, nested: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the kinds of the layers, which published files number from 1."""
    numbers = range(1, fields.integer("num_hidden_layers") + 1)
    # transformers has this default; the published model names other layers.
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
            fields.note_wrong(text, linear_attn_config=None)
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
        separate=True,
        by_channel=True,
    )


class KimiLinear(Llama, config=KimiLinearConfig):
    """Kimi Linear (Moonshot AI, 2025) has a gated delta rule with a decay for each channel of keys.

    Every fourth layer has the latent attention of DeepSeek-V3 without rotary embedding.
    """

    renamed = {
        # When transformers saves a model, it renames these in all layers, also in dense ones.
        **{f".mlp.{part}": f".{EXPERTS}.{part}" for part in FEED_FORWARD},
        # These are the names that transformers has in memory.
        **{f".self_attn.{part}": f".self_attn.forget_gate.{part}" for part in DECAY},
    }
    expert_names = ExpertNames(EXPERTS, "w1", "w3", "w2", shared=("shared_experts", None))

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the latent attention of a layer."""
        return latent.latent_attention(config, config.latent, index, at)

    @classmethod
    def make_recurrence(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the delta rule of a layer."""
        at = layer / "self_attn"
        width, delta = config.hidden_size, config.recurrent
        rank = delta.key  # that of decays and gates, which two projections in a row compute
        inner, outer = ("embed", None), (None, "heads")
        return recurrences.delta_net(
            config,
            delta,
            index,
            at,
            input=at.projection(
                width, ("q_proj", delta.keys), ("k_proj", delta.keys), ("v_proj", delta.values)
            ),
            beta_step=at.projection(width, ("b_proj", delta.value_heads)),
            norm="o_norm",
            output="o_proj",
            channels=ChannelMatmuls(
                at.projection(width, ("f_a_proj", rank), ("g_a_proj", rank), axes=inner),
                at.projection(rank, ("f_b_proj", delta.keys), axes=outer),
                at.projection(rank, ("g_b_proj", delta.values), axes=outer),
            ),
        )
