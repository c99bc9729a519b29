"""LFM2 (Liquid AI, 2025), dense and with experts, and LFM3 (2026).

Most layers have gated short convolutions, the others attention. A convolution keeps the inputs of
the last few tokens, and no state. LFM3 adds sliding windows in some layers, a gate for each head,
and by default norms after attention, the convolution and the MLP.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flax import nnx

from jaxpage.layers import NO_ROTATION, Rope
from jaxpage.layers.convolution import ConvolutionSpec
from jaxpage.models.config import NO_ROPE, ExpertDefaults, Fields, layer_windows
from jaxpage.models.config.proportional_rope import read_rope
from jaxpage.models.llama import Llama
from jaxpage.models.parts import Scope, attention, recurrences
from jaxpage.models.parts.decoder_config import DecoderConfig, Defaults, ExpertsConfig
from jaxpage.models.parts.names import AttentionNames, ExpertNames, MLPNames, ModuleNames, NormNames

FULL = "full_attention"
SLIDING = "sliding_attention"
CONVOLUTION = "conv"
ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.5,
    },
}
DEFAULTS = Defaults(
    num_kv_heads=8,
    max_length=128_000,
    theta=1_000_000.0,
    epsilon=("norm_eps", 1e-5),
    activation=("", "silu"),
    tied=True,
)


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(DecoderConfig):
    """Reads transformers' `Lfm2Config`.

    Attributes:
        convolution: The layers of which `kv.states` has a state.
    """

    model_type = "lfm2"
    defaults = DEFAULTS
    # The names of fields in published files, which outrank those of the class in transformers.
    published: ClassVar[Mapping[str, str]] = {
        "tie_embedding": "tie_word_embeddings",
        "block_ff_dim": "intermediate_size",
    }

    convolution: ConvolutionSpec

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config with the names of the class alone."""
        names = cls.published
        stated = {names[field]: config[field] for field in names if field in config}
        return {field: config[field] for field in config if field not in names} | stated

    @classmethod
    def read(cls, fields: Fields) -> Lfm2Config:
        """Returns what the fields say."""
        width = _feed_forward_width(fields)
        types = fields.layer_types(
            _usual_types(fields), kinds=(FULL, CONVOLUTION), older={"attention": FULL}
        )
        return cls.from_fields(fields, intermediate_size=width, **read_kinds(fields, types))


def read_kinds(fields: Fields, types: Sequence[str], *, kernel: int = 3) -> dict[str, Any]:
    """Returns the arguments of `from_fields` that say which layers are convolutions.

    Args:
        fields: The fields of the config.json.
        types: The types of the layers.
        kernel: The default of the number of tokens that a convolution spans.
    """
    convolution = ConvolutionSpec(
        width=fields.integer("hidden_size"),
        kernel=fields.integer("conv_L_cache", kernel),
        bias=fields.flag("conv_bias", False),
    )
    states = tuple(convolution.state if kind == CONVOLUTION else None for kind in types)
    return {"kv": {"states": states}, "convolution": convolution}


def _usual_types(fields: Fields) -> list[str]:
    """Returns the types of the layers: those of `full_attn_idxs` attend, or all without it."""
    numbers = range(fields.integer("num_hidden_layers"))
    attending = fields.get("full_attn_idxs", None)
    if attending is not None and not isinstance(attending, list):
        text = f"full_attn_idxs must be a list, not {attending!r}"
        fields.note_wrong(text, full_attn_idxs=None)
        attending = None
    return [FULL if attending is None or index in attending else CONVOLUTION for index in numbers]


def _feed_forward_width(fields: Fields) -> int:
    """Returns the inner width: two thirds of the field's, times a factor, rounded up."""
    width = fields.integer("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    # Three products of two thirds have as many weights as two of the whole width (Shazeer, 2020).
    width = int(2 * width / 3)
    factor = fields.optional_number("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return width
    multiple = fields.integer("block_multiple_of", 256)
    return -(-int(factor * width) // multiple) * multiple


class Lfm2(Llama, config=Lfm2Config):
    """LFM2 (Liquid AI, 2025) has gated short convolutions in most layers, attention in the others.

    A convolution keeps the inputs of the last few tokens, and no state.
    """

    names = ModuleNames(norm="embedding_norm")
    norm_names = NormNames("operator_norm", "ffn_norm")
    attention_names = AttentionNames("out_proj")
    mlp_names = MLPNames("feed_forward", "w1", "w3", "w2", None)
    make_head_norms = staticmethod(
        functools.partial(attention.norms_of_heads, names=("q_layernorm", "k_layernorm"))
    )

    @classmethod
    def make_recurrence(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns the convolution of a layer."""
        return recurrences.gated_convolution(config.convolution, index, layer / "conv")


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(Lfm2Config, ExpertsConfig):
    """Reads transformers' `Lfm2MoeConfig`."""

    model_type = "lfm2_moe"
    published = {"tie_embedding": "tie_word_embeddings"}
    expert_defaults = ExpertDefaults(
        count=32,
        per_token=4,
        width=1792,
        normalized=("norm_topk_prob", True),
        factor=("routed_scaling_factor", 1.0),
        routing={"sigmoid": True, "epsilon": 1e-6},
        num_dense=("num_dense_layers", 2),
    )

    @classmethod
    def read(cls, fields: Fields) -> Lfm2MoeConfig:
        """Returns what the fields say."""
        num_layers = fields.integer("num_hidden_layers")
        if fields.get("layer_types", None) is None:
            text = f"layer_types must name each of the {num_layers} layers, not None"
            fields.note_wrong(text, layer_types=[FULL] * num_layers)
        corrected = fields.flag("use_expert_bias", True)
        types = fields.layer_types([FULL] * num_layers, kinds=(FULL, CONVOLUTION))
        return cls.from_fields(
            fields,
            **read_kinds(fields, types),
            experts=cls.expert_defaults.read(fields, routing={"corrected": corrected}),
        )


class Lfm2Moe(Lfm2, config=Lfm2MoeConfig):
    """LFM2 with experts (Liquid AI, 2025) is LFM2 with experts in all but the first few layers."""

    expert_names = ExpertNames(
        "feed_forward",
        "w1",
        "w3",
        "w2",
        correction="expert_bias",
        in_memory=("feed_forward", "gate", "expert_bias"),
    )


@dataclass(frozen=True, kw_only=True)
class Lfm3Config(Lfm2Config):
    """Reads transformers' `Lfm3Config`.

    Full-attention and sliding-window layers have different rotary embeddings.

    Attributes:
        gated: True if each head has a gate.
        has_norms_after: True if there are norms after both halves.
    """

    model_type = "lfm3"
    aliases = {"norm_eps": "rms_norm_eps"}
    published = {}
    defaults = replace(DEFAULTS, num_kv_heads=4, attention_bias=False)

    gated: bool
    has_norms_after: bool

    @classmethod
    def read(cls, fields: Fields) -> Lfm3Config:
        """Returns what the fields say."""
        numbers = range(fields.integer("num_hidden_layers"))
        types = fields.layer_types(
            [_usual_type(number) for number in numbers], kinds=(FULL, SLIDING, CONVOLUTION)
        )
        head_dim = fields.integer("head_dim", 128)
        ropes = _read_ropes(fields, types, head_dim)
        max_length = fields.integer("max_position_embeddings", 128_000)
        return cls.from_fields(
            fields,
            head_dim=head_dim,
            sliding_windows=layer_windows.read_windows(fields, types, 256),
            **read_kinds(fields, types, kernel=7),
            rope=(ropes.get(FULL, NO_ROTATION), max_length),
            rope_by_layer=tuple(ropes.get(kind) for kind in types),
            gated=fields.flag("use_attention_gate", True),
            has_norms_after=fields.flag("use_sandwich_norm", True),
        )


def _usual_type(number: int) -> str:
    """Returns the default type of a layer."""
    if number % 4 == 2:
        return FULL
    return CONVOLUTION if number % 2 or number == 0 else SLIDING


def _read_ropes(fields: Fields, types: Sequence[str], head_dim: int) -> dict[str, Rope]:
    """Returns the rotary embedding of each type of attention layer.

    As in transformers, fields at the top of the config are defaults for all types.
    """
    stated = fields.get("rope_scaling", None) or fields.get("rope_parameters", None)
    stated = ROPES if stated is None else stated
    usual = {
        "rope_theta": fields.get("rope_theta", 1_000_000.0),
        "partial_rotary_factor": fields.get("partial_rotary_factor", None),
    }
    if head_dim % 2:
        text = f"the rotary embedding needs an even head width, not head_dim = {head_dim}"
        fields.note_wrong(text, head_dim=128)
    ropes = {}
    for kind in [kind for kind in ROPES if kind in types]:
        rope = stated.get(kind) if isinstance(stated, dict) else None
        if not isinstance(rope, dict):
            text = f"rope_parameters must have an object for {kind}, not {stated!r}"
            fields.note_wrong(text, **NO_ROPE)
            rope = ROPES[kind]
        ropes[kind] = read_rope(fields, kind, {**usual, **rope}, head_dim)
    return ropes


class Lfm3(Lfm2, config=Lfm3Config):
    """LFM3 (Liquid AI, 2026) is LFM2 with windows in some layers, and a gate for each head."""

    @classmethod
    def make_norms(cls, config: Any, index: int, layer: Scope) -> dict[str, Any]:
        """Returns the norms of a layer; those of the outputs of its halves may be left out."""
        norms = super().make_norms(config, index, layer)
        if config.has_norms_after:
            norms["post_attention_norm"] = cls.make_norm(config, layer / "post_operator_norm")
            norms["post_mlp_norm"] = cls.make_norm(config, layer / "post_ffn_norm")
        return norms

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns the attention of a layer."""
        # Files have the first name, transformers in memory the second one.
        gates = attention.Gates(1, "gate_proj", "g_proj") if config.gated else None
        norms = attention.norms_of_heads(config, at)
        return attention.grouped_query_attention(config, index, at, norms=norms, gates=gates)
