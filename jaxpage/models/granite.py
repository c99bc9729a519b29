"""Granite 3 and 4 (IBM, 2024 and 2025), dense and with experts, and Granite Swash (IBM, 2026).

All multiply four things by factors of their config: embeddings, scores of attention, the output of
each half of a layer before it is added to the residual stream, and logits. A layer of Granite 4 has
Mamba 2 or attention, most often without positions; models without the letter H in their names have
attention in all layers. Granite Swash has attention sinks, and windows in three layers of four.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from flax import nnx

from jaxpage.layers import MambaSpec, Scores
from jaxpage.models.config import ExpertDefaults, Fields, layer_windows, recurrent_fields
from jaxpage.models.llama import Llama
from jaxpage.models.parts import Block, ExpertNames, MLPNames, Scope, attention, recurrences
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults, ExpertsConfig

_Granite = TypeVar("_Granite", bound="GraniteConfig")
_GraniteMoeShared = TypeVar("_GraniteMoeShared", bound="GraniteMoeSharedConfig")

MLP_NAMES = MLPNames("shared_mlp", gate=None, up=None, down="output_linear", fused="input_linear")
EXPERT_NAMES = ExpertNames(
    "block_sparse_moe",
    router="router.layer",
    shared=(None, None),
    in_memory=("block_sparse_moe", "router", ""),
    together=("input_linear", "output_linear"),
)
FULL = "full_attention"
LINEAR = "linear_attention"


@dataclass(frozen=True)
class GraniteFactors:
    """Holds the factors of embeddings, of scores, of the outputs of halves, and of logits."""

    embedding: float
    attention: float
    residual: float
    logits: float

    @classmethod
    def read(cls, fields: Fields) -> GraniteFactors:
        """Returns what the fields say; logits are divided by `logits_scaling`."""
        return cls(
            embedding=fields.number("embedding_multiplier", 1.0),
            attention=fields.number("attention_multiplier", 1.0),
            residual=fields.number("residual_multiplier", 1.0),
            logits=1 / fields.number("logits_scaling", 1.0),
        )


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """Reads transformers' `GraniteConfig`.

    Attributes:
        factors: The factors; that of scores takes the place of the root of the width of a head.
    """

    model_type = "granite"
    defaults = Defaults(attention_bias=False, mlp_bias=False)

    factors: GraniteFactors

    @classmethod
    def from_fields(cls: type[_Granite], fields: Fields, **options: Any) -> _Granite:
        """Returns the config, with the factors that its fields say."""
        return super().from_fields(fields, factors=GraniteFactors.read(fields), **options)


class Granite(Llama, config=GraniteConfig):
    """Granite 3, dense (IBM, 2024), is Llama with factors."""

    @classmethod
    def make_block(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns a layer of Llama in which the outputs of both halves have a factor."""
        return Block(
            **cls.make_norms(config, index, layer),
            attention=cls.make_mixer(config, index, layer),
            mlp=cls.make_mlp(config, index, layer),
            residual_scale=config.factors.residual,
        )

    @classmethod
    def make_scores(cls, config: Any, at: Scope) -> Scores:
        """Returns the factor of scores."""
        return Scores(scale=config.factors.attention)

    def enter(self, embedded_TD: jax.Array, positions_T: jax.Array) -> jax.Array:
        """Returns the input of the first layer, made of embedded tokens."""
        # In `enter`, for transformers scales vectors in the place of tokens, too.
        return super().enter(embedded_TD, positions_T) * self.config.factors.embedding

    def logits(self, hidden_BD: jax.Array) -> jax.Array:
        """Returns the logits in float32."""
        return super().logits(hidden_BD) * self.config.factors.logits


@dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(GraniteConfig, ExpertsConfig):
    """Reads transformers' `GraniteMoeConfig`."""

    model_type = "granitemoe"
    defaults = Defaults(attention_bias=False)
    expert_defaults = ExpertDefaults(
        count_field="num_local_experts",
        count=8,
        per_token=2,
        width_field="intermediate_size",
        width=11008,
        normalized=True,
    )


class GraniteMoe(Granite, config=GraniteMoeConfig):
    """Granite 3 with experts (IBM, 2024) is Granite whose layers all have experts."""

    expert_names = EXPERT_NAMES
    mlp_names = MLP_NAMES


class GraniteMoeSharedConfig(GraniteMoeConfig):
    """Reads transformers' `GraniteMoeSharedConfig` (IBM, 2025)."""

    model_type = "granitemoeshared"

    @classmethod
    def from_fields(
        cls: type[_GraniteMoeShared], fields: Fields, **options: Any
    ) -> _GraniteMoeShared:
        """Returns the config; a width of 0 is no shared expert."""
        shared_width = fields.integer("shared_intermediate_size", 0, minimum=0) or None
        experts = cls.expert_defaults.read(fields, shared_width=shared_width)
        return super().from_fields(fields, experts=experts, **options)


class GraniteMoeShared(GraniteMoe, config=GraniteMoeSharedConfig):
    """GraniteMoeShared (IBM, 2025) is Granite with routed experts and a shared expert."""


class GraniteSWAConfig(GraniteConfig):
    """Reads transformers' `GraniteSWAConfig`."""

    model_type = "granite_swa"
    defaults = Defaults(
        num_kv_heads=4,
        max_length=8192,
        epsilon=1e-5,
        tied=True,
        attention_bias=False,
        mlp_bias=False,
    )

    @classmethod
    def read(cls, fields: Fields) -> GraniteConfig:
        """Returns what the fields say."""
        return cls.from_fields(fields, **read_swash(fields, cls.defaults))


def read_swash(fields: Fields, defaults: Defaults) -> dict[str, Any]:
    """Returns the arguments of `from_fields` that say what differs from layer to layer.

    By default layers 0, 4, 8, ... see all positions and the others have a sliding window. Each
    layer has its own `rope_theta`, or no rotary embedding.
    """
    head_dim = defaults.read_head_dim(fields)
    max_length = fields.integer("max_position_embeddings", defaults.max_length)
    parameters = fields.rope_parameters(max_length, 10_000.0)
    # 0 means no rotary embedding.
    thetas = layer_windows.read_by_layer(
        fields,
        "layer_rope_theta",
        [parameters["rope_theta"]] * fields.integer("num_hidden_layers"),
        lambda theta: type(theta) in (int, float) and 0 <= theta < math.inf,
        "a number, or 0,",
    )
    ropes = {
        theta: fields.rope_of({**parameters, "rope_theta": theta}, head_dim, max_length)[0]
        for theta in thetas
        if theta
    }
    return {
        "sliding_windows": layer_windows.read_windows(
            fields, layer_windows.layer_types(fields, 4, first=0), 128
        ),
        "rope_by_layer": tuple(ropes.get(theta) for theta in thetas),
    }


class GraniteSWA(Granite, config=GraniteSWAConfig):
    """Granite Swash (IBM, 2026) is Granite with attention sinks and sliding windows."""

    @classmethod
    def make_scores(cls, config: Any, at: Scope) -> Scores:
        """Returns the factor of scores, and the sinks."""
        sinks = attention.attention_sinks(config, at / "sinks")
        return Scores(scale=config.factors.attention, sinks=sinks)


class GraniteMoeSWAConfig(GraniteSWAConfig, GraniteMoeSharedConfig):
    """Reads transformers' `GraniteMoeSWAConfig`."""

    model_type = "granitemoe_swa"
    # Its class has the defaults of the other models with experts, and none of Swash.
    defaults = GraniteMoeSharedConfig.defaults


class GraniteMoeSWA(GraniteSWA, config=GraniteMoeSWAConfig):
    """Granite Swash with experts (IBM, 2026) may have a shared expert next to the routed ones."""

    expert_names = EXPERT_NAMES
    mlp_names = MLP_NAMES


@dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(GraniteMoeConfig):
    """Reads transformers' `GraniteMoeHybridConfig`.

    Attributes:
        recurrent: Mamba 2, which each layer has that has a state in `kv.states`.
    """

    model_type = "granitemoehybrid"
    aliases = {"layer_types": "layers_block_type"}

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
        mamba = recurrent_fields.read_mamba(fields)
        # Published models without positions say "nope", and null, the default, means the same.
        positions = fields.get("position_embedding_type", None)
        if positions not in (None, "nope", "rope"):
            text = f"position_embedding_type = {positions!r} is not one of rope, nope, null"
            fields.note_unsupported(text, position_embedding_type="rope")
        # Dense models have the expert of all tokens alone, as their feed-forward half.
        shared_width = fields.integer("shared_intermediate_size", 1024)
        experts = None
        if has_experts := fields.integer("num_local_experts", 8, minimum=0) > 0:
            experts = cls.expert_defaults.read(fields, shared_width=shared_width)
        return cls.from_fields(
            fields,
            kv={"states": tuple(mamba.state if kind == LINEAR else None for kind in types)},
            intermediate_size=shared_width,
            rope_by_layer=() if positions == "rope" else (None,) * num_layers,
            recurrent=mamba,
            experts=experts,
            sparse_layers=(has_experts,) * num_layers,
        )


class GraniteMoeHybrid(GraniteMoe, config=GraniteMoeHybridConfig):
    """Granite 4 (IBM, 2025) is Granite with layers of Mamba 2, with experts or without."""

    @classmethod
    def make_recurrence(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns Mamba 2 of a layer that keeps a state."""
        return recurrences.mamba2(config, config.recurrent, index, layer / "mamba")
