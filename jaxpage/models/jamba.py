"""Jamba (AI21, 2024) has Mamba in most layers, attention in the others, and experts in some.

Attention has no positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jaxpage.layers.context import ForwardContext
from jaxpage.layers.mamba1 import Mamba1, Mamba1Spec
from jaxpage.layers.rope import NO_ROTATION
from jaxpage.models.base import Hidden, KVSpec, Pages, run_layers
from jaxpage.models.block_form import BlockForm
from jaxpage.models.config_fields import WrongField
from jaxpage.models.decoder_names import DecoderNames
from jaxpage.models.experts import ExpertNames, read_experts
from jaxpage.models.fields import Fields
from jaxpage.models.mamba_config import read_rank
from jaxpage.models.mlp import MLPNames
from jaxpage.models.rotary_decoder import (
    DecoderLayer,
    RotaryDecoder,
    RotaryDecoderSpec,
    ignored,
    key_value_heads,
    prefix,
    read_head_dim,
)

__all__ = ["Model", "Spec", "ignored", "prefix"]

FORM = BlockForm(norms=("input_layernorm", None, "pre_ff_layernorm", None))
NAMES = DecoderNames(norm="final_layernorm")
MLP_NAMES = MLPNames("feed_forward")
EXPERT_NAMES = ExpertNames(
    "feed_forward", router="router", in_memory=("feed_forward", "router", "")
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `JambaConfig`.

    Among the layers of the cache, keys and values, or states, of all layers come first. After them
    come the inputs of the convolutions.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "jamba", {"num_local_experts": "num_experts"}) as fields:
            fields.only(sliding_window=None, mamba_inner_layernorms=True)
            num_layers = fields.integer("num_hidden_layers")
            mamba = _read_mamba(fields)
            attends = _every(fields, "attn_layer", 8, 4, num_layers)
            experts = None
            if fields.integer("num_local_experts", 16, least=0) > 1:
                experts = read_experts(
                    fields,
                    count=("num_local_experts", 16),
                    per_token=2,
                    width=("intermediate_size", 14336),
                    normalized=False,
                )
            sparse = _every(fields, "expert_layer", 2, 1, num_layers)
            longest = fields.integer("max_position_embeddings", 262_144)
            head_dim = read_head_dim(fields)
            spec = cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                head_dim=head_dim,
                max_position_embeddings=longest,
                rope=(NO_ROTATION, longest),
                form=FORM,
                names=NAMES,
                mlp_names=MLP_NAMES,
                recurrent=mamba,
                experts=experts,
                expert_names=EXPERT_NAMES,
                sparse_layers=tuple(experts is not None and each for each in sparse),
            )
        states = (
            *(None if each else mamba.state for each in attends),
            *(mamba.convolved for each in attends if not each),
        )
        kv = KVSpec(
            len(states),
            spec.kv.num_kv_heads,
            head_dim,
            (None,) * len(states),
            states=states,
            decoder_layers=num_layers,
        )
        return replace(spec, kv=kv)


def _every(fields: Fields, name: str, period: int, offset: int, num_layers: int) -> list[bool]:
    """Returns for each layer whether it is one of a kind that comes again after a period."""
    names = f"{name}_period", f"{name}_offset"
    period = fields.integer(names[0], period)
    offset = fields.integer(names[1], offset, least=0)
    if offset >= period:
        text = f"{names[1]} = {offset} must be smaller than {names[0]} = {period}"
        fields.note(WrongField(text), **dict(zip(names, (1, 0), strict=True)))
    return [index % period == offset for index in range(num_layers)]


def _read_mamba(fields: Fields) -> Mamba1Spec:
    return Mamba1Spec(
        inner=fields.integer("mamba_expand", 2) * fields.integer("hidden_size"),
        vector=fields.integer("mamba_d_state", 16),
        rank=read_rank(fields, "mamba_dt_rank"),
        kernel=fields.integer("mamba_d_conv", 4),
        activation=fields.activation("hidden_act", "silu"),
        convolution_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias", False),
    )


class Model(RotaryDecoder):
    """Computes the model; see `models.base.Model`.

    Attributes:
        is_mamba: True for each layer that has Mamba.
    """

    def __init__(self, spec: RotaryDecoderSpec, *, dtype: DTypeLike):
        super().__init__(spec, dtype=dtype)
        kinds: list[bool] = []
        free = itertools.count(spec.num_layers)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            kinds.append(isinstance(layer.attention, Mamba1))
            if isinstance(layer.attention, Mamba1):
                layer.attention.convolution_index = next(free)
        self.is_mamba = tuple(kinds)

    def __call__(
        self, token_ids_T: Int[Array, "T"], pages: Pages, context: ForwardContext
    ) -> Hidden:
        """Returns hidden states, pages and auxiliary hidden states."""
        more = iter(pages[len(self.layers) :])
        by_layer = tuple(
            (layer_pages, next(more)) if is_mamba else layer_pages
            for layer_pages, is_mamba in zip(pages, self.is_mamba, strict=False)
        )
        hidden_TD = self.embed(token_ids_T, context.positions_T)
        output_TD, by_layer, entering = run_layers(
            self.layers, self.norm, hidden_TD, by_layer, context
        )
        new_pages = list(zip(by_layer, self.is_mamba, strict=True))
        layer_pages = tuple(each[0] if is_mamba else each for each, is_mamba in new_pages)
        return (
            output_TD,
            (*layer_pages, *(each[1] for each, is_mamba in new_pages if is_mamba)),
            entering,
        )
