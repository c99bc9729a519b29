"""Holds MPNet (Song et al., 2020): BERT whose scores have a bias by the distance of two tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxpage.layers.embedding import Embedding
from jaxpage.models.bert import Roberta
from jaxpage.models.config.fields import Fields
from jaxpage.models.parts.encoder import (
    DISTANCE_BUCKETS,
    EncoderConfig,
    PostNormBlock,
    attention_both_ways,
    read_encoder,
)
from jaxpage.models.parts.mlp import plain_mlp
from jaxpage.models.parts.norms import layer_norm
from jaxpage.models.parts.projection import projection
from jaxpage.models.parts.scope import Scope

_PADDING_ID = 1  # whatever config.json says


@dataclass(frozen=True, kw_only=True)
class MPNetConfig(EncoderConfig):
    """Holds what a config.json of MPNet says."""

    model_type = "mpnet"

    name: str = "mpnet"

    @classmethod
    def read(cls, fields: Fields) -> MPNetConfig:
        """Reads the fields; the rows of positions begin after that of the padding token."""
        fields.only(relative_attention_num_buckets=DISTANCE_BUCKETS)
        rows = fields.integer("max_position_embeddings", 512, least=_PADDING_ID + 2)
        return cls(
            **read_encoder(fields, num_positions=rows - _PADDING_ID - 1),
            has_distances=True,
            first_position=_PADDING_ID + 1,
            padding_id=_PADDING_ID,
            idle_tensors=("*pooler.dense.*",),
        )


class MPNet(Roberta, config=MPNetConfig):
    """MPNet, and what was trained from it: all-mpnet-base, multi-qa-mpnet, paraphrase-mpnet."""

    prefix = "mpnet."
    ignored: ClassVar[tuple[str, ...]] = ("*position_ids", "lm_head.*")

    @classmethod
    def make_distances(cls, config: Any, at: Scope) -> Embedding:
        """Returns the table of biases, a row for each bucket of distances and a column a head."""
        name = (at / "encoder.relative_attention_bias").name
        heads = config.num_query_heads
        return Embedding(DISTANCE_BUCKETS, heads, name=name, axis=None, dtype=at.dtype)

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> PostNormBlock:
        """Returns a layer."""
        width = config.hidden_size
        inner = config.num_query_heads * config.kv.head_dim
        attention = at / "attention.attn"
        parts = [(name, inner) for name in ("q", "k", "v")]
        inputs = projection(width, attention, *parts, bias=True)
        output = projection(inner, attention, ("o", width), axes=("heads", "embed"), bias=True)
        return PostNormBlock(
            attention_both_ways(config, index, inputs, output),
            layer_norm(config, at / "attention.LayerNorm"),
            plain_mlp(config, at, "intermediate.dense", "output.dense", bias=True),
            layer_norm(config, at / "output.LayerNorm"),
        )
