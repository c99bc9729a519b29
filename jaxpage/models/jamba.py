"""Jamba (AI21, 2024) has Mamba in most layers, attention in the others, and experts in some.

Attention has no positions. A layer of Mamba has two layers of the cache: its states are where other
layers have keys and values, and the inputs of its convolution come after all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpage.layers.mamba1 import Mamba1Spec
from jaxpage.models.config.config_fields import WrongField
from jaxpage.models.config.experts import read_experts
from jaxpage.models.config.fields import Fields
from jaxpage.models.config.mamba_config import read_rank
from jaxpage.models.llama import Llama
from jaxpage.models.parts.block import Block
from jaxpage.models.parts.decoder import ModuleNames
from jaxpage.models.parts.decoder_config import Defaults
from jaxpage.models.parts.experts import ExpertNames, ExpertsConfig, mlp_or_experts
from jaxpage.models.parts.mlp import MLPNames
from jaxpage.models.parts.norms import rms_norm
from jaxpage.models.parts.recurrences import cache_of_states, mamba1
from jaxpage.models.parts.scope import Scope

MLP_NAMES = MLPNames("feed_forward")
EXPERT_NAMES = ExpertNames(
    "feed_forward", router="router", in_memory=("feed_forward", "router", "")
)


@dataclass(frozen=True, kw_only=True)
class JambaConfig(ExpertsConfig):
    """Reads transformers' `JambaConfig`.

    Attributes:
        recurrent: The layers of Mamba.
    """

    model_type = "jamba"
    aliases = {"num_local_experts": "num_experts"}
    defaults = Defaults(num_kv_heads=8, max_length=262_144, has_rope=False)

    recurrent: Mamba1Spec

    @property
    def layer_places(self) -> Sequence[int | tuple[int, ...]]:
        """Returns for each layer the place of its pages; see `run_layers`."""
        return [self.places_of(index) for index in range(self.num_layers)]

    def places_of(self, index: int) -> int | tuple[int, int]:
        """Returns the places of states and of convolutions, or the one of keys and values."""
        states = self.kv.states
        if states[index] is None:
            return index
        return index, self.num_layers + sum(state is not None for state in states[:index])

    @classmethod
    def read(cls, fields: Fields) -> JambaConfig:
        """Returns what the fields say."""
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
        states = (
            *(None if each else mamba.state for each in attends),
            *(mamba.convolved for each in attends if not each),
        )
        return cls.from_fields(
            fields,
            kv=cache_of_states(states, num_layers),
            recurrent=mamba,
            experts=experts,
            sparse_layers=tuple(experts is not None and each for each in sparse),
        )


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


class Jamba(Llama, config=JambaConfig):
    """Jamba (AI21, 2024) has Mamba in most layers, attention in the others, and experts in some."""

    names = ModuleNames(norm="final_layernorm")

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns a layer, with Mamba in the place of attention where it keeps a state."""
        places = config.places_of(index)
        return Block(
            attention_norm=rms_norm(config, at / "input_layernorm"),
            attention=cls.make_attention(config, index, at / "self_attn")
            if isinstance(places, int)
            else mamba1(config, config.recurrent, index, at / "mamba", convolution_index=places[1]),
            mlp_norm=rms_norm(config, at / "pre_ff_layernorm"),
            mlp=mlp_or_experts(config, index, at, names=EXPERT_NAMES, mlp_names=MLP_NAMES),
        )
