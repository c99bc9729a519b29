"""Mamba 1 and 2 alone (Gu and Dao, 2023; Dao and Gu, 2024), and Falcon Mamba (TII, 2024).

They have no attention and no feed-forward layers. What a sequence keeps does not grow with its
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from jaxpage.layers.mamba import MambaSpec
from jaxpage.layers.mamba1 import Mamba1Spec
from jaxpage.models.config.config_fields import WrongField
from jaxpage.models.config.fields import Fields
from jaxpage.models.config.mamba_config import read_groups, read_rank, read_time_steps
from jaxpage.models.parts.block import HalfBlock
from jaxpage.models.parts.decoder import Decoder, ModuleNames
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.norms import rms_norm
from jaxpage.models.parts.recurrences import cache_of_states, mamba1, mamba2
from jaxpage.models.parts.scope import Scope

LONGEST = 2**18  # The models have no positions and could go on; block tables have to end somewhere.


@dataclass(frozen=True, kw_only=True)
class MambaConfig(DecoderConfig):
    """Reads transformers' `MambaConfig`.

    Among the layers of the cache the states of all layers come first. After them come the inputs of
    the convolutions.

    Attributes:
        recurrent: The layers.
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
        states = (mamba.state,) * num_layers + (mamba.convolved,) * num_layers
        return cls.from_fields(
            fields,
            num_kv_heads=1,
            head_dim=64,
            rope=fields.rope(64, LONGEST),
            kv=cache_of_states(states, num_layers),
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
            rank=read_rank(fields, "time_step_rank"),
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
    def make_block(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns a layer."""
        return HalfBlock(rms_norm(config, at / "norm"), cls.make_mixer(config, index, at / "mixer"))

    @classmethod
    def make_mixer(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the recurrence of a layer."""
        states, convolution = config.layer_places[index]
        return mamba1(config, config.recurrent, states, at, convolution_index=convolution)


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
        recurrent: The layers.
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
            rope=fields.rope(64, LONGEST),
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
        fields.note(WrongField(text), num_heads=heads, head_dim=head)
    bias = fields.flag("use_bias", False)
    return MambaSpec(
        heads=heads,
        head=head,
        groups=read_groups(fields, ("n_groups", 8), num_heads=heads),
        vector=fields.integer("state_size", 128),
        kernel=fields.integer("conv_kernel", 4),
        activation=fields.activation("hidden_act", "silu"),
        time_steps=read_time_steps(fields),
        convolution_bias=fields.flag("use_conv_bias", True),
        input_bias=bias,
        output_bias=bias,
    )


class Mamba2Decoder(Mamba, config=Mamba2Config):
    """Mamba 2 alone (Dao and Gu, 2024) has no attention and no feed-forward layers.

    What a sequence keeps does not grow with its length.
    """

    @classmethod
    def make_mixer(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the recurrence of a layer."""
        return mamba2(config, config.recurrent, index, at)
