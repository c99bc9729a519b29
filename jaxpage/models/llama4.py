"""Llama 4, text (Meta, 2025), attends to chunks of positions, except in layers that do not rotate.

Three layers of four rotate, and there a token sees those positions of its own chunk that are not
after it (`AttentionOptions.attention_chunk`). To the cache a chunk is a window of its size, which
holds all that a token sees of its chunk and more. Where no sequence is longer than a chunk, all
layers are full ones. In some or all layers experts take the place of the feed-forward half:

    position        0  1  2  3   4  5  6  7     attention_chunk_size 4
    5 sees                       x  x           in a layer that rotates
    5 sees          x  x  x  x   x  x           in a layer that does not
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpage.layers.attention import HeadNorms, Scores
from jaxpage.models.config.config_fields import WrongField
from jaxpage.models.config.experts import read_experts
from jaxpage.models.config.fields import Fields
from jaxpage.models.config.layer_windows import rotating_layers
from jaxpage.models.llama import Llama
from jaxpage.models.parts.attention import grouped_query_attention, norms_of_heads
from jaxpage.models.parts.decoder_config import Defaults
from jaxpage.models.parts.experts import ExpertNames, ExpertsConfig
from jaxpage.models.parts.mlp import MLPNames
from jaxpage.models.parts.norms import unscaled_rms_norm
from jaxpage.models.parts.scope import Scope

CHUNKED = "chunked_attention"
FULL = "full_attention"
MLP_NAMES = MLPNames(module="feed_forward")
EXPERT_NAMES = ExpertNames(
    module="feed_forward",
    router="router",
    shared=("shared_expert", None),
    in_memory=("feed_forward", "router", ""),
    only_stacked=True,
)


@dataclass(frozen=True, kw_only=True)
class Llama4Config(ExpertsConfig):
    """Reads transformers' `Llama4TextConfig`.

    The jitter of the router is for training.

    Attributes:
        use_qk_norm: True if queries and keys of layers that rotate have norms.
        temperature_tuning: How queries of the other layers grow with positions; see `Scores`.
    """

    model_type = "llama4_text"
    defaults = Defaults(
        num_kv_heads=8,
        max_length=131_072,
        theta=500_000.0,
        interleaved=True,
        epsilon=1e-5,
        attention_bias=False,
    )

    use_qk_norm: bool
    temperature_tuning: tuple[float, int, int] | None

    @classmethod
    def read(cls, fields: Fields) -> Llama4Config:
        """Returns what the fields say."""
        rotates = rotating_layers(fields)
        return cls.from_fields(
            fields,
            head_dim=fields.optional_integer("head_dim", 128),
            sliding_windows=_chunks(fields, rotates),
            intermediate_size=fields.integer("intermediate_size_mlp", 16_384),
            rotates=rotates,
            use_qk_norm=fields.flag("use_qk_norm", True),
            temperature_tuning=_temperature_tuning(fields),
            experts=read_experts(
                fields,
                count=("num_local_experts", 16),
                per_token=1,
                width=("intermediate_size", 8192),
                normalized=False,
                routing={"sigmoid": True},
                shared_width=fields.integer("intermediate_size", 8192),
                scales_input=True,
            ),
            sparse_layers=_sparse_layers(fields),
        )


def _chunks(fields: Fields, rotates: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Returns the size of the chunks in each layer; None in those that see everything."""
    types = fields.layer_types(
        [CHUNKED if does_rotate else FULL for does_rotate in rotates], kinds=(CHUNKED, FULL)
    )
    size = fields.optional_integer("attention_chunk_size", 8192)
    if size is None:  # transformers refuses it, whatever the layers are.
        text = "attention_chunk_size must be an integer >= 1, not None"
        fields.note(WrongField(text), attention_chunk_size=8192)
    return tuple(size if kind == CHUNKED else None for kind in types)


def _temperature_tuning(fields: Fields) -> tuple[float, int, int] | None:
    """Returns how queries grow with positions, counted from 1, in layers that do not rotate."""
    tuned = fields.get("attn_temperature_tuning", True)
    growth = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192), 1
    if not isinstance(tuned, int | None):  # The published files have 4 for true.
        text = f"attn_temperature_tuning must be true or false, not {tuned!r}"
        fields.note(WrongField(text), attn_temperature_tuning=True)
    return growth if tuned else None


def _sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Returns which layers have experts."""
    num_layers = fields.integer("num_hidden_layers")
    every = fields.integer("interleave_moe_layer_step", 1)
    sparse = fields.get("moe_layers", None)
    sparse = list(range(every - 1, num_layers, every)) if sparse is None else sparse
    if not isinstance(sparse, list) or not all(type(layer) is int for layer in sparse):
        text = f"moe_layers must be the numbers of layers, not {sparse!r}"
        fields.note(WrongField(text), moe_layers=None)
        sparse = []
    return tuple(layer in sparse for layer in range(num_layers))


class Llama4(Llama, config=Llama4Config):
    """Llama 4, text (Meta, 2025), attends to chunks of positions in the layers that rotate."""

    expert_names = EXPERT_NAMES
    mlp_names = MLP_NAMES

    @classmethod
    def make_attention(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns attention with norms if it rotates, and with growing queries if not."""
        norms = HeadNorms()
        scores = Scores(chunked=True)
        if config.rope_of(index) is None:
            scores = Scores(chunked=True, temperature_tuning=config.temperature_tuning)
        elif config.use_qk_norm:
            norms = norms_of_heads(config, at, unscaled_rms_norm, after_rotation=True)
        return grouped_query_attention(config, index, at, norms=norms, scores=scores)
