"""Mamba 2 alone (Dao and Gu, 2024) has no attention and no feed-forward layers.

What a sequence keeps does not grow with its length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpage.layers.mamba import MambaSpec
from jaxpage.models import nemotron_h
from jaxpage.models.config_fields import WrongField
from jaxpage.models.fields import Fields
from jaxpage.models.mamba_config import read_groups, read_time_steps
from jaxpage.models.nemotron_h import LINEAR, Model
from jaxpage.models.rotary_decoder import RotaryDecoderSpec

__all__ = ["Model", "Spec", "ignored", "prefix"]

prefix = "backbone."
ignored: tuple[str, ...] = ()
LONGEST = 2**18  # The model has no positions and could go on; block tables have to end somewhere.


class Spec(nemotron_h.Spec):
    """Reads transformers' `Mamba2Config`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "mamba2") as fields:
            mamba = _read_mamba(fields)
            num_layers = fields.integer("num_hidden_layers", 64)
            # No layer attends. A spec has heads of attention all the same.
            fields.config |= {"num_attention_heads": mamba.heads, "intermediate_size": mamba.inner}
            return cls._from_fields(
                fields,
                num_kv_heads=mamba.heads,
                head_dim=64,
                max_position_embeddings=LONGEST,
                states=(mamba.state,) * num_layers,
                epsilon=("layer_norm_epsilon", 1e-5),
                activation="silu",
                rope_by_layer=(None,) * num_layers,
                recurrent=mamba,
                name="backbone",
                types=(LINEAR,) * num_layers,
            )


def _read_mamba(fields: Fields) -> MambaSpec:
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
