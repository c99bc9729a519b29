"""Kimi Linear (Moonshot AI, 2025) has a gated delta rule with a decay for each channel of a key.

Every fourth layer has the latent attention of DeepSeek-V3 without rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.layers.delta_net import DeltaWidths
from jaxpage.layers.rope import NO_ROTATION
from jaxpage.models.config_fields import RefusedField, WrongField
from jaxpage.models.deepseek_v3 import first_dense, knobs_of, read_corrected_experts, sparse_by_type
from jaxpage.models.delta_config import check_activation
from jaxpage.models.experts import ExpertNames
from jaxpage.models.fields import Fields
from jaxpage.models.latent import LatentSpec, read_widths
from jaxpage.models.qwen3_5 import FULL, LINEAR
from jaxpage.models.rotary_decoder import RotaryDecoder, RotaryDecoderSpec, ignored, prefix

__all__ = ["Model", "Spec", "ignored", "prefix", "renamed"]

Model = RotaryDecoder
EXPERTS = "block_sparse_moe"
EXPERT_NAMES = ExpertNames(EXPERTS, "w1", "w3", "w2", shared=("shared_experts", None))
HALF = ("shared_experts", "gate_proj", "up_proj", "down_proj")
DECAY = ("f_a_proj", "f_b_proj", "dt_bias", "A_log")
renamed = {
    # When transformers saves a model, it renames these in all layers, also in dense ones.
    **{f".mlp.{part}": f".{EXPERTS}.{part}" for part in HALF},
    # These are the names that transformers has in memory.
    **{f".self_attn.{part}": f".self_attn.forget_gate.{part}" for part in DECAY},
}
ALIASES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
# Fields of `linear_attn_config` in published files, with their names in transformers' class.
NESTED = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


class Spec(RotaryDecoderSpec):
    """Reads transformers' `KimiLinearConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        inner = config.get("linear_attn_config")
        nested = inner if isinstance(inner, dict) else {}
        config = {
            **config,
            **{field: nested[name] for name, field in NESTED.items() if name in nested},
        }
        with Fields(config, "kimi_linear", ALIASES) as fields:
            if inner is not None and inner is not nested:
                text = f"linear_attn_config must be an object, not {inner!r}"
                fields.note(WrongField(text), linear_attn_config=None)
            check_activation(fields)
            _refuse(fields)
            types = _layer_types(fields, nested)
            delta = _read_delta(fields)
            widths = read_widths(fields, query_rank=None)
            latent = LatentSpec(widths, widths.query**-0.5, fields.flag("attention_bias", False))
            longest = fields.integer("max_position_embeddings", 1_048_576)
            return cls._from_fields(
                fields,
                epsilon=("rms_norm_eps", 1e-5),
                states=tuple(delta.state if kind == LINEAR else None for kind in types),
                recurrent=delta,
                experts=read_corrected_experts(
                    fields,
                    count=256,
                    count_field="num_local_experts",
                    per_token=8,
                    width=1024,
                    groups=(1, 1),
                    factor=2.446,
                ),
                expert_names=EXPERT_NAMES,
                sparse_layers=sparse_by_type(fields, first_dense(fields, 1)),
                **knobs_of(latent, NO_ROTATION, longest),
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
