"""Granite 4 (IBM, 2025) is Granite whose layers have Mamba 2 or attention, most without positions.

Each feed-forward half has an expert of all tokens, which is alone where there are no others. Files
of Granite 4 without the letter H have attention in all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpage.layers.mamba import MambaSpec
from jaxpage.models.config.config_fields import RefusedField
from jaxpage.models.config.fields import Fields
from jaxpage.models.config.mamba_config import read_mamba
from jaxpage.models.granite import GraniteFactors, GraniteMoe, granite_experts
from jaxpage.models.parts.decoder_config import Defaults
from jaxpage.models.parts.experts import ExpertsConfig
from jaxpage.models.parts.recurrences import mamba2
from jaxpage.models.parts.scope import Scope

FULL = "full_attention"
LINEAR = "linear_attention"


@dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(ExpertsConfig):
    """Reads transformers' `GraniteMoeHybridConfig`.

    Attributes:
        factors: See `GraniteConfig`.
        recurrent: The layers of which `kv.states` has a state.
    """

    model_type = "granitemoehybrid"
    aliases = {"layer_types": "layers_block_type"}
    defaults = Defaults(attention_bias=False)

    factors: GraniteFactors
    recurrent: MambaSpec

    @classmethod
    def read(cls, fields: Fields) -> GraniteMoeHybridConfig:
        """Returns what the fields say."""
        num_layers = fields.integer("num_hidden_layers")
        types = fields.layer_types(
            (LINEAR,) * num_layers,
            kinds=(FULL, LINEAR),
            older={"attention": FULL, "mamba": LINEAR},
        )
        mamba = read_mamba(fields)
        positions = fields.get("position_embedding_type", None)
        if positions not in (None, "nope", "rope"):
            text = f"position_embedding_type = {positions!r} is not one of rope, nope, null"
            fields.note(RefusedField(text), position_embedding_type="rope")
        shared_width = fields.integer("shared_intermediate_size", 1024)
        has_experts = fields.integer("num_local_experts", 8, least=0) > 0
        return cls.from_fields(
            fields,
            kv={"states": tuple(mamba.state if kind == LINEAR else None for kind in types)},
            intermediate_size=shared_width,
            rope_by_layer=() if positions == "rope" else (None,) * num_layers,
            recurrent=mamba,
            experts=granite_experts(fields, shared_width) if has_experts else None,
            sparse_layers=(has_experts,) * num_layers,
            factors=GraniteFactors.read(fields),
        )


class GraniteMoeHybrid(GraniteMoe, config=GraniteMoeHybridConfig):
    """Granite 4 (IBM, 2025) is Granite with layers of Mamba 2, with experts or without."""

    @classmethod
    def make_mixer(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns Mamba 2 of a layer that keeps a state, or its attention."""
        if config.kv.state_of(index) is not None:
            return mamba2(config, config.recurrent, index, layer / "mamba")
        return super().make_mixer(config, index, layer)
