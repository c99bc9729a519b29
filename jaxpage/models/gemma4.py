"""Gemma 4, text (Gemma Team, 2026), has wider heads in full layers, and layers that share pages.

The last layers of E2B and E4B have no keys and values: they read those of the last layer before
them that has their type, in its pages. Each layer also takes an input of its own from the token
(`PerLayerInputs`). 26B-A4B has experts next to the feed-forward half of each layer:

    layers   0 sliding   1 full   2 sliding   3 full   4 sliding   5 full     num_kv_shared_layers 2
    pages    0           1        2           3        2           3
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jaxpage.layers.context import ForwardContext
from jaxpage.layers.experts import ExpertsSpec
from jaxpage.layers.rope import Rope
from jaxpage.layers.routing import Routing
from jaxpage.models.base import Hidden, KVSpec, Pages, run_layers
from jaxpage.models.config_fields import RefusedField, WrongField
from jaxpage.models.fields import Fields
from jaxpage.models.gemma import ACTIVATION
from jaxpage.models.gemma4_layer import (
    FULL,
    SLIDING,
    Gemma4Layer,
    Gemma4Spec,
    PerLayerInputs,
    find_shared_layers,
)
from jaxpage.models.layer_windows import layer_types
from jaxpage.models.proportional_rope import read_rope
from jaxpage.models.rotary_decoder import (
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
)

__all__ = ["OVERFLOWS_FLOAT16", "Model", "Spec", "ignored", "prefix"]

OVERFLOWS_FLOAT16 = True
ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


class Spec(Gemma4Spec):
    """Reads transformers' `Gemma4TextConfig`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        config = dict(config)
        by_layer = config.pop("per_layer_config", None)
        with Fields(config, "gemma4_text") as fields:
            if fields.get("use_bidirectional_attention", None) not in (None, "vision"):
                text = "use_bidirectional_attention (attention to later tokens) is not supported"
                fields.note(RefusedField(text), use_bidirectional_attention=None)
            types = (*layer_types(fields, 6)[:-1], FULL)  # The last layer is always a full one.
            heads = _heads(fields, types, by_layer)
            ropes, longest = _ropes(fields, heads)
            places = find_shared_layers(fields, types, 0)
            spec = cls._from_fields(
                fields,
                num_kv_heads=heads[SLIDING][0],
                head_dim=heads[SLIDING][1],
                max_position_embeddings=longest,
                attention_bias=fields.flag("attention_bias", False),
                rope=(ropes[FULL], longest),
                rope_by_layer=tuple(ropes[kind] for kind in types),
                activation=("hidden_activation", ACTIVATION),
                tied=True,
                attention_scale=1.0,
                embedding_scale=math.sqrt(fields.integer("hidden_size")),
                logit_softcap=fields.optional_number("final_logit_softcapping", None),
                layer_types=types,
                places=places,
                keys_are_values=fields.flag("attention_k_eq_v", False),
                wide_mlp=fields.flag("use_double_wide_mlp", False),
                **_inputs(fields),
                **_experts(fields),
            )
            window = fields.integer("sliding_window", 512)
            types_with_pages = types[: 1 + max(places)]
            kv = KVSpec(
                len(types_with_pages),
                *heads[SLIDING],
                tuple(window if kind == SLIDING else None for kind in types_with_pages),
                decoder_layers=len(types),
                heads=tuple(heads[kind] for kind in types_with_pages),
            )
            return dataclasses.replace(spec, kv=kv)


def _heads(fields: Fields, types: tuple[str, ...], by_layer: Any) -> dict[str, tuple[int, int]]:
    """Returns the number of key/value heads, and their width, of each type of layer.

    Args:
        fields: The fields of the config.
        types: The type of each layer.
        by_layer: `per_layer_config`, which transformers 5.24 writes in place of the fields for full
            layers.
    """
    sliding_heads = key_value_heads(fields, 4), fields.integer("head_dim", 256)
    few = fields.optional_integer("num_global_key_value_heads", None)
    if few is None or not fields.flag("attention_k_eq_v", False):
        few = sliding_heads[0]
    heads = {SLIDING: sliding_heads, FULL: (few, fields.integer("global_head_dim", 512))}
    if by_layer is not None:
        heads = _heads_by_layer(fields, types, by_layer, sliding_heads)
    few = heads[FULL][0]
    num_heads = fields.integer("num_attention_heads")
    if few != sliding_heads[0] and num_heads % few:
        text = f"num_global_key_value_heads = {few} must divide num_attention_heads = {num_heads}"
        fields.note(WrongField(text), num_global_key_value_heads=None)
    return heads


def _heads_by_layer(
    fields: Fields, types: tuple[str, ...], by_layer: Any, default_heads: tuple[int, int]
) -> dict[str, tuple[int, int]]:
    """Returns what `_heads` does; the keys of `by_layer` are the numbers of layers, as in "05"."""
    heads = {SLIDING: default_heads, FULL: default_heads}
    changes = {int(layer): each for layer, each in by_layer.items()}
    default = dict(zip(("num_key_value_heads", "head_dim"), default_heads, strict=True))
    alike = True
    for layer, kind in enumerate(types):
        of_layer = {**default, **changes.get(layer, {})}
        pairs = tuple(of_layer.values())
        if layer == types.index(kind) and len(pairs) == 2:
            heads[kind] = pairs
        alike = alike and pairs == heads[kind]
    if not alike:
        text = "per_layer_config is supported for num_key_value_heads and head_dim alone, alike in"
        fields.note(RefusedField(f"{text} all layers of a type"), per_layer_config=None)
    return heads


def _ropes(fields: Fields, heads: Mapping[str, tuple[int, int]]) -> tuple[dict[str, Rope], int]:
    """Returns the rotation of each type of layer, and the number of positions."""
    longest = fields.integer("max_position_embeddings", 131_072)
    stated = fields.get("rope_parameters", None)
    scaling = fields.get("rope_scaling", stated)  # It replaces the other one in transformers too.
    if stated is not None and scaling != stated:
        text = "rope_scaling and rope_parameters contradict each other"
        fields.note(WrongField(text), rope_parameters=None, rope_scaling=None)
    stated = scaling or ROPES
    ropes = {}
    for kind, (_, width) in heads.items():
        of_kind = stated.get(kind) if isinstance(stated, dict) else None
        ropes[kind] = read_rope(fields, kind, of_kind if isinstance(of_kind, dict) else {}, width)
    return ropes, longest


def _inputs(fields: Fields) -> dict[str, Any]:
    """Returns the fields of the spec about the layers' own inputs."""
    width = fields.integer("hidden_size_per_layer_input", 256, least=0)
    rows = fields.integer("vocab_size_per_layer_input", 262_144)
    if width and rows < (size := fields.integer("vocab_size")):
        text = f"vocab_size_per_layer_input = {rows} must not be less than vocab_size = {size}"
        fields.note(WrongField(text), vocab_size_per_layer_input=size)
    return {"input_width": width or None, "input_vocab_size": rows}


def _experts(fields: Fields) -> dict[str, Any]:
    """Returns the fields of the spec about experts."""
    if not fields.flag("enable_moe_block", False):
        return {}
    num_experts = fields.integer("num_experts")
    per_token = fields.integer("top_k_experts")
    if per_token > num_experts:
        text = f"top_k_experts = {per_token} of num_experts = {num_experts} experts cannot be"
        fields.note(WrongField(text), top_k_experts=1, num_experts=num_experts)
        per_token = 1
    routing = Routing(num_experts=num_experts, per_token=per_token, normalized=True)
    return {"experts": ExpertsSpec(routing, fields.integer("moe_intermediate_size"))}


class Model(RotaryDecoder):
    """Computes Gemma 4; see `models.base.Model`."""

    layer = Gemma4Layer

    def __init__(self, spec: Gemma4Spec, *, dtype: DTypeLike):
        super().__init__(spec, dtype=dtype)
        self.inputs = None if spec.input_width is None else PerLayerInputs(spec, dtype=dtype)
        self.places = spec.places

    def __call__(
        self, token_ids_T: Int[Array, "T"], pages: Pages, context: ForwardContext
    ) -> Hidden:
        """Returns hidden states, pages and auxiliary hidden states."""
        hidden_TD = self.tokens(token_ids_T) * self.embedding_scale
        layers: list[Any] = list(self.layers)
        if self.inputs is not None:
            inputs_TLI = self.inputs(token_ids_T, hidden_TD)
            layers = [
                functools.partial(layer, input_TI=inputs_TLI[:, number])
                for number, layer in enumerate(layers)
            ]
        return run_layers(layers, self.norm, hidden_TD, pages, context, self.places)
