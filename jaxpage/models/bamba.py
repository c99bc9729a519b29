"""Bamba (IBM, Princeton and UIUC, 2024) has Mamba 2 in most layers, attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpage.layers.mamba import MambaSpec
from jaxpage.models.config.config_fields import WrongField
from jaxpage.models.config.fields import Fields, without
from jaxpage.models.config.mamba_config import read_mamba
from jaxpage.models.llama import Llama
from jaxpage.models.parts.block import Block
from jaxpage.models.parts.decoder import ModuleNames
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults
from jaxpage.models.parts.mlp import gated_mlp
from jaxpage.models.parts.norms import rms_norm
from jaxpage.models.parts.recurrences import mamba2
from jaxpage.models.parts.scope import Scope


@dataclass(frozen=True, kw_only=True)
class BambaConfig(DecoderConfig):
    """Reads transformers' `BambaConfig`.

    The share of a head that is rotated is a half, unless `rope_parameters` says otherwise.

    Attributes:
        recurrent: The layers of which `kv.states` has a state.
    """

    model_type = "bamba"
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
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config without a share that transformers passes over."""
        return without(config, "partial_rotary_factor")

    @classmethod
    def read(cls, fields: Fields) -> BambaConfig:
        """Returns what the fields say."""
        num_layers = fields.integer("num_hidden_layers")
        attending = fields.get("attn_layer_indices", None) or []
        if not isinstance(attending, list):
            text = f"attn_layer_indices must be a list, not {attending!r}"
            fields.note(WrongField(text), attn_layer_indices=None)
            attending = []
        mamba = read_mamba(fields)
        states = tuple(None if index in attending else mamba.state for index in range(num_layers))
        return cls.from_fields(fields, kv={"states": states}, recurrent=mamba)


class Bamba(Llama, config=BambaConfig):
    """Bamba (IBM, Princeton and UIUC, 2024) has Mamba 2 in most layers, attention in the others."""

    names = ModuleNames(norm="final_layernorm")

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns a layer, with Mamba 2 in the place of attention where it keeps a state."""
        has_state = config.kv.state_of(index) is not None
        return Block(
            attention_norm=rms_norm(config, at / "input_layernorm"),
            attention=mamba2(config, config.recurrent, index, at / "mamba")
            if has_state
            else cls.make_attention(config, index, at / "self_attn"),
            mlp_norm=rms_norm(config, at / "pre_ff_layernorm"),
            mlp=gated_mlp(config, at / "feed_forward"),
        )
