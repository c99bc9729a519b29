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

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax.typing import DTypeLike

from jaxpage.layers.attention import Attention
from jaxpage.models.block_form import BlockForm
from jaxpage.models.config_fields import WrongField
from jaxpage.models.experts import ExpertNames, read_experts
from jaxpage.models.fields import Fields
from jaxpage.models.layer_windows import rotating_layers
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

CHUNKED = "chunked_attention"
FULL = "full_attention"
NAMES = ExpertNames(
    module="feed_forward",
    router="router",
    shared=("shared_expert", None),
    in_memory=("feed_forward", "router", ""),
    only_stacked=True,
)


class Spec(RotaryDecoderSpec):
    """Reads transformers' `Llama4TextConfig`.

    The jitter of the router is for training.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RotaryDecoderSpec:
        """Returns the spec of a config.json."""
        with Fields(config, "llama4_text") as fields:
            head_dim = fields.optional_integer("head_dim", 128) or read_head_dim(fields)
            longest = fields.integer("max_position_embeddings", 131_072)
            rope, longest = fields.rope(head_dim, longest, theta=500_000.0)
            rope = replace(rope, interleaved=True)
            rotates = rotating_layers(fields)
            inner = fields.integer("intermediate_size", 8192)
            return cls._from_fields(
                fields,
                num_kv_heads=key_value_heads(fields, 8),
                head_dim=head_dim,
                max_position_embeddings=longest,
                sliding_windows=_chunks(fields, rotates),
                attention_bias=fields.flag("attention_bias", False),
                rope=(rope, longest),
                rope_by_layer=tuple(rope if turns else None for turns in rotates),
                epsilon=("rms_norm_eps", 1e-5),
                form=BlockForm(head_scales="none", turned_first=True),
                norm_heads=fields.flag("use_qk_norm", True),
                temperature_tuning=_temperature_tuning(fields),
                feed_forward_width=fields.integer("intermediate_size_mlp", 16_384),
                mlp_names=MLPNames(module="feed_forward"),
                experts=read_experts(
                    fields,
                    count=("num_local_experts", 16),
                    per_token=1,
                    width=("intermediate_size", 8192),
                    normalized=False,
                    routing={"sigmoid": True},
                    shared_width=inner,
                    scales_input=True,
                ),
                expert_names=NAMES,
                sparse_layers=_sparse_layers(fields),
            )


def _chunks(fields: Fields, rotates: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Returns the size of the chunks in each layer; None in those that see everything."""
    types = fields.layer_types(
        [CHUNKED if turns else FULL for turns in rotates], kinds=(CHUNKED, FULL)
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


class Llama4Layer(DecoderLayer):
    """Computes a layer with norms of queries and keys if it rotates, and growing queries if not."""

    def __init__(self, spec: RotaryDecoderSpec, layer_index: int, *, name: str, dtype: DTypeLike):
        super().__init__(spec, layer_index, name=name, dtype=dtype)
        attention = self.attention
        assert isinstance(attention, Attention)
        attention.chunked = True
        if attention.rope is None:
            attention.query_norm = attention.key_norm = None
        else:
            attention.temperature_tuning = None


class Model(RotaryDecoder):
    """Computes Llama 4; see `models.base.Model`."""

    layer = Llama4Layer
