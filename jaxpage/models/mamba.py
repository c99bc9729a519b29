"""Mamba 1 and 2 (Gu and Dao, 2023; Dao and Gu, 2024), alone and with attention in some layers.

Mamba, Mamba 2 and Falcon Mamba (TII, 2024) have no attention and no feed-forward layers: what a
sequence keeps does not grow with its length. Jamba (AI21, 2024) has Mamba in most layers, attention
without positions in the others, and experts in some; Bamba (IBM, Princeton and UIUC, 2024) has
Mamba 2. A layer of Mamba 1 has two layers of the cache: its states are where other layers have keys
and values, and the inputs of its convolution come after all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from jaxpage.layers import MambaSpec
from jaxpage.layers.mamba1 import Mamba1Spec
from jaxpage.models.config import ExpertDefaults, Fields, recurrent_fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts import Decoder, HalfBlock, Scope, norms, recurrences
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults, ExpertsConfig
from jaxpage.models.parts.names import ExpertNames, MLPNames, ModuleNames, NormNames

# The models have no positions and could go on; block tables have to end somewhere.
MAX_LENGTH = 2**18


@dataclass(frozen=True, kw_only=True)
class MambaConfig(DecoderConfig):
    """Reads transformers' `MambaConfig`.

    Among the layers of the cache the states of all layers come first. After them come the inputs of
    the convolutions.

    Attributes:
        recurrent: Mamba 1, which all layers have.
    """

    model_type = "mamba"
    defaults = Defaults(epsilon=("layer_norm_epsilon", 1e-5), activation=("", "silu"), tied=True)

    recurrent: Mamba1Spec

    @property
    def layer_places(self) -> Sequence[tuple[int, ...]]:
        """Returns for each layer the places of its states and of its convolution."""
        return [(index, self.num_layers + index) for index in range(self.num_layers)]

    @classmethod
    def read(cls, fields: Fields) -> MambaConfig:
        """Returns what the fields say."""
        mamba = cls.read_mamba(fields)
        num_layers = fields.integer("num_hidden_layers")
        # No layer attends. A config has heads of attention all the same.
        fields.config |= {"num_attention_heads": 1, "intermediate_size": mamba.inner}
        states = (mamba.state,) * num_layers + (mamba.convolution_state,) * num_layers
        return cls.from_fields(
            fields,
            num_kv_heads=1,
            head_dim=64,
            rope=fields.rope(64, MAX_LENGTH),
            kv=recurrences.cache_of_states(states, num_layers),
            recurrent=mamba,
            name="backbone",
        )

    @classmethod
    def read_mamba(cls, fields: Fields) -> Mamba1Spec:
        """Returns the description of the layers."""
        width = fields.integer("hidden_size")
        return Mamba1Spec(
            inner=fields.integer("intermediate_size", fields.integer("expand", 2) * width),
            vector=fields.integer("state_size", 16),
            rank=recurrent_fields.read_rank(fields, "time_step_rank"),
            kernel=fields.integer("conv_kernel", 4),
            activation=fields.activation("hidden_act", "silu"),
            convolution_bias=fields.flag("use_conv_bias", True),
            bias=fields.flag("use_bias", False),
            normed=False,
        )


class Mamba(Decoder, config=MambaConfig):
    """Mamba alone (Gu and Dao, 2023) has no attention and no feed-forward layers.

    What a sequence keeps does not grow with its length.
    """

    prefix = "backbone."
    ignored = ()
    names = ModuleNames(tokens="embeddings", norm="norm_f")

    @classmethod
    def make_block(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns a layer."""
        norm = norms.rms_norm(config, layer / "norm")
        return HalfBlock(norm, cls.make_recurrence(config, index, layer))

    @classmethod
    def make_recurrence(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the recurrence of a layer."""
        states, convolution = config.layer_places[index]
        return recurrences.mamba1(
            config, config.recurrent, states, layer / "mixer", convolution_index=convolution
        )


class FalconMambaConfig(MambaConfig):
    """Reads transformers' `FalconMambaConfig`."""

    model_type = "falcon_mamba"

    @classmethod
    def read_mamba(cls, fields: Fields) -> Mamba1Spec:
        """Returns the description of the layers."""
        epsilon = fields.number("mixer_rms_eps", 1e-6)
        return replace(super().read_mamba(fields), normed=True, plain_epsilon=epsilon)


class FalconMamba(Mamba, config=FalconMambaConfig):
    """Falcon Mamba (TII, 2024) is Mamba 1 with norms, without scales, of time steps, B and C."""


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(DecoderConfig):
    """Reads transformers' `Mamba2Config`.

    Attributes:
        recurrent: Mamba 2, which all layers have.
    """

    model_type = "mamba2"
    defaults = Defaults(epsilon=("layer_norm_epsilon", 1e-5), activation=("", "silu"))

    recurrent: MambaSpec

    @classmethod
    def read(cls, fields: Fields) -> Mamba2Config:
        """Returns what the fields say."""
        mamba = _read_mamba2(fields)
        num_layers = fields.integer("num_hidden_layers", 64)
        # No layer attends. A config has heads of attention all the same.
        fields.config |= {"num_attention_heads": mamba.heads, "intermediate_size": mamba.inner}
        return cls.from_fields(
            fields,
            num_kv_heads=mamba.heads,
            head_dim=64,
            rope=fields.rope(64, MAX_LENGTH),
            kv={"states": (mamba.state,) * num_layers},
            recurrent=mamba,
            name="backbone",
        )


def _read_mamba2(fields: Fields) -> MambaSpec:
    heads = fields.integer("num_heads", 128)
    head = fields.integer("head_dim", 64)
    inner = fields.integer("expand", 2) * fields.integer("hidden_size")
    if heads * head != inner:
        text = f"num_heads = {heads} times head_dim = {head} must be expand * hidden_size = {inner}"
        fields.note_wrong(text, num_heads=heads, head_dim=head)
    return recurrent_fields.read_mamba2(fields, "num_heads", "head_dim", "state_size", "hidden_act")


class Mamba2Decoder(Mamba, config=Mamba2Config):
    """Mamba 2 alone (Dao and Gu, 2024) has no attention and no feed-forward layers.

    What a sequence keeps does not grow with its length.
    """

    @classmethod
    def make_recurrence(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the recurrence of a layer."""
        return recurrences.mamba2(config, config.recurrent, index, layer / "mixer")


@dataclass(frozen=True, kw_only=True)
class JambaConfig(ExpertsConfig):
    """Reads transformers' `JambaConfig`.

    Attributes:
        recurrent: Mamba 1, which some layers have in the place of attention.
    """

    model_type = "jamba"
    aliases = {"num_local_experts": "num_experts"}
    defaults = Defaults(num_kv_heads=8, max_length=262_144, has_rope=False)
    expert_defaults = ExpertDefaults(
        count_field="num_local_experts",
        count=16,
        per_token=2,
        width_field="intermediate_size",
        width=14336,
        normalized=False,
    )

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
        if fields.integer("num_local_experts", 16, minimum=0) > 1:
            experts = cls.expert_defaults.read(fields)
        sparse = _every(fields, "expert_layer", 2, 1, num_layers)
        states = (
            *(None if each else mamba.state for each in attends),
            *(mamba.convolution_state for each in attends if not each),
        )
        return cls.from_fields(
            fields,
            kv=recurrences.cache_of_states(states, num_layers),
            recurrent=mamba,
            experts=experts,
            sparse_layers=tuple(experts is not None and each for each in sparse),
        )


def _every(fields: Fields, name: str, period: int, offset: int, num_layers: int) -> list[bool]:
    """Returns for each layer whether it is one of a kind that comes again after a period."""
    names = f"{name}_period", f"{name}_offset"
    period = fields.integer(names[0], period)
    offset = fields.integer(names[1], offset, minimum=0)
    if offset >= period:
        text = f"{names[1]} = {offset} must be smaller than {names[0]} = {period}"
        fields.note_wrong(text, **dict(zip(names, (1, 0), strict=True)))
    return [index % period == offset for index in range(num_layers)]


def _read_mamba(fields: Fields) -> Mamba1Spec:
    return Mamba1Spec(
        inner=fields.integer("mamba_expand", 2) * fields.integer("hidden_size"),
        vector=fields.integer("mamba_d_state", 16),
        rank=recurrent_fields.read_rank(fields, "mamba_dt_rank"),
        kernel=fields.integer("mamba_d_conv", 4),
        activation=fields.activation("hidden_act", "silu"),
        convolution_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias", False),
    )


class Jamba(Llama, config=JambaConfig):
    """Jamba (AI21, 2024) has Mamba in most layers, attention in the others, and experts in some."""

    names = ModuleNames(norm="final_layernorm")
    norm_names = NormNames(mlp_norm="pre_ff_layernorm")
    mlp_names = MLPNames("feed_forward")
    expert_names = ExpertNames(
        "feed_forward", router="router", in_memory=("feed_forward", "router", "")
    )

    @classmethod
    def make_recurrence(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns Mamba of a layer."""
        states, convolution = config.places_of(index)
        return recurrences.mamba1(
            config, config.recurrent, states, layer / "mamba", convolution_index=convolution
        )


@dataclass(frozen=True, kw_only=True)
class BambaConfig(DecoderConfig):
    """Reads transformers' `BambaConfig`.

    The share of a head that is rotated is a half, unless `rope_parameters` says otherwise.

    Attributes:
        recurrent: Mamba 2, which each layer has that has a state in `kv.states`.
    """

    model_type = "bamba"
    idle_fields = ("partial_rotary_factor",)
    defaults = Defaults(
        num_kv_heads=8,
        max_length=262_144,
        partial=0.5,
        epsilon=1e-5,
        attention_bias=False,
        mlp_bias=False,
    )

    recurrent: MambaSpec

    @classmethod
    def read(cls, fields: Fields) -> BambaConfig:
        """Returns what the fields say."""
        num_layers = fields.integer("num_hidden_layers")
        attending = fields.get("attn_layer_indices", None) or []
        if not isinstance(attending, list):
            text = f"attn_layer_indices must be a list, not {attending!r}"
            fields.note_wrong(text, attn_layer_indices=None)
            attending = []
        mamba = recurrent_fields.read_mamba(fields)
        states = tuple(None if index in attending else mamba.state for index in range(num_layers))
        return cls.from_fields(fields, kv={"states": states}, recurrent=mamba)


class Bamba(Llama, config=BambaConfig):
    """Bamba (IBM, Princeton and UIUC, 2024) has Mamba 2 in most layers, attention in the others."""

    names = ModuleNames(norm="final_layernorm")
    norm_names = NormNames(mlp_norm="pre_ff_layernorm")
    mlp_names = MLPNames("feed_forward")

    @classmethod
    def make_recurrence(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns Mamba 2 of a layer."""
        return recurrences.mamba2(config, config.recurrent, index, layer / "mamba")
