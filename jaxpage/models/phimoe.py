"""Phi-3.5-MoE (Microsoft, 2024) weighs each of two experts among those that are close to it.

It has LayerNorm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxpage.layers.rope_scaling import LENGTH
from jaxpage.models.block_form import BlockForm
from jaxpage.models.config_fields import WrongField
from jaxpage.models.experts import ExpertNames, read_experts
from jaxpage.models.fields import Fields, without
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
    read_head_dim,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

Model = RotaryDecoder
THETA = 1_000_000.0
NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2", in_memory=("mlp", "router", ""))


class Spec(RotaryDecoderSpec):
    """Reads transformers' `PhimoeConfig`.

    The noise of inputs is for training; that of the router decides which experts are close.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        scaling = config.get("rope_parameters") or config.get("rope_scaling")
        if isinstance(scaling, dict) and LENGTH in scaling:
            # In this family the length in the dict outranks the one at the top of the file.
            config = without(config, LENGTH)
        with Fields(config, "phimoe", {"num_local_experts": "num_experts"}) as fields:
            fields.only(num_experts_per_tok=2)
            num_layers = fields.integer("num_hidden_layers")
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                sliding_windows=(fields.optional_integer("sliding_window", None),) * num_layers,
                attention_bias=fields.flag("attention_bias", False),
                head_bias=fields.flag("lm_head_bias", False),
                epsilon=("rms_norm_eps", 1e-5),
                form=BlockForm(kind="layer"),
                experts=read_experts(
                    fields,
                    count=("num_local_experts", 16),
                    per_token=2,
                    width=("intermediate_size", 6400),
                    normalized=True,
                    routing={"jitter": fields.number("router_jitter_noise", 0.01)},
                ),
                expert_names=NAMES,
                sparse_layers=(True,) * num_layers,
                **_rope(fields),
            )


def _rope(fields: Fields) -> dict[str, Any]:
    """Returns the arguments about positions; a scaled rope has its own factor of sines."""
    head_dim = read_head_dim(fields)
    longest = fields.integer("max_position_embeddings", 131_072)
    rope, longest = fields.rope(head_dim, longest, theta=THETA)
    parameters = fields.rope_parameters(longest, THETA)
    if parameters["rope_type"] != "default":
        factor = parameters.get("short_mscale")
        if not isinstance(factor, int | float) or not 0 < factor < 1e30:
            text = f"rope short_mscale must be a positive number, not {factor!r}"
            fields.note(WrongField(text), rope_scaling=None, rope_parameters=None)
            factor = 1.0
        rope = replace(rope, attention_factor=float(factor))
    return {
        "head_dim": head_dim,
        "max_position_embeddings": longest,
        "rope": (rope, longest),
    }
