"""Holds the lineage of BERT: learned positions, and norms after each half of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxpage.layers.embedding import Embedding
from jaxpage.models.config.fields import Fields
from jaxpage.models.parts.encoder import (
    Encoder,
    EncoderConfig,
    PostNormBlock,
    ScoreHead,
    attention_both_ways,
    read_encoder,
)
from jaxpage.models.parts.mlp import plain_mlp
from jaxpage.models.parts.norms import layer_norm
from jaxpage.models.parts.projection import projection
from jaxpage.models.parts.scope import Scope

_POOLER = "*pooler.dense.*"


@dataclass(frozen=True, kw_only=True)
class BertConfig(EncoderConfig):
    """Holds what a config.json of BERT says."""

    model_type = "bert"

    name: str = "bert"

    @classmethod
    def read(cls, fields: Fields) -> BertConfig:
        """Reads the fields."""
        common = read_encoder(fields, num_positions=fields.integer("max_position_embeddings", 512))
        return cls(
            **common,
            token_types=fields.integer("type_vocab_size", 2),
            idle_tensors=() if common["num_labels"] else (_POOLER,),
        )


class Bert(Encoder, config=BertConfig):
    """BERT, and what was trained from it: MiniLM, E5, BGE, GTE, cross-encoders of MS MARCO."""

    prefix = "bert."
    ignored: ClassVar[tuple[str, ...]] = ("*position_ids", "cls.*")
    # Files that were converted from TensorFlow have these names.
    renamed: ClassVar[Mapping[str, str]] = {
        "LayerNorm.weight": "LayerNorm.gamma",
        "LayerNorm.bias": "LayerNorm.beta",
    }

    @classmethod
    def make_tables(
        cls, config: Any, at: Scope
    ) -> tuple[Embedding, Embedding | None, Embedding | None]:
        """Returns the tables of tokens, positions and token types."""
        tables = at / "embeddings"
        width = config.hidden_size
        num_positions = config.max_position_embeddings + config.first_position

        def table(rows: int, name: str, axis: str | None = None) -> Embedding:
            return Embedding(rows, width, name=(tables / name).name, axis=axis, dtype=at.dtype)

        return (
            table(config.vocab_size, "word_embeddings", "vocab"),
            table(num_positions, "position_embeddings"),
            table(config.token_types, "token_type_embeddings") if config.token_types else None,
        )

    @classmethod
    def make_table_norm(cls, config: Any, at: Scope) -> Any:
        """Returns the norm of the sum of the tables' rows."""
        return layer_norm(config, at / "embeddings.LayerNorm")

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> PostNormBlock:
        """Returns a layer."""
        width = config.hidden_size
        inner = config.num_query_heads * config.kv.head_dim
        parts = [(name, inner) for name in ("query", "key", "value")]
        inputs = projection(width, at / "attention.self", *parts, bias=True)
        attended = at / "attention.output"
        axes = ("heads", "embed")
        output = projection(inner, attended, ("dense", width), axes=axes, bias=True)
        return PostNormBlock(
            attention_both_ways(config, index, inputs, output),
            layer_norm(config, attended / "LayerNorm"),
            plain_mlp(config, at, "intermediate.dense", "output.dense", bias=True),
            layer_norm(config, at / "output.LayerNorm"),
        )

    @classmethod
    def make_head(cls, config: Any, at: Scope) -> ScoreHead:
        """Returns the pooler and the classifier."""
        width = config.hidden_size
        dense = projection(width, at / config.name / "pooler", ("dense", width), bias=True)
        output = projection(width, at, ("classifier", config.num_labels), bias=True)
        return ScoreHead(dense, jnp.tanh, output)


@dataclass(frozen=True, kw_only=True)
class RobertaConfig(EncoderConfig):
    """Holds what a config.json of RoBERTa says."""

    model_type = "roberta"

    name: str = "roberta"

    @classmethod
    def read(cls, fields: Fields) -> RobertaConfig:
        """Reads the fields; the rows of positions begin after that of the padding token."""
        padding_id = fields.integer("pad_token_id", 1, least=0)
        rows = fields.integer("max_position_embeddings", 512, least=padding_id + 2)
        return cls(
            **read_encoder(fields, num_positions=rows - padding_id - 1),
            token_types=fields.integer("type_vocab_size", 2),
            first_position=padding_id + 1,
            padding_id=padding_id,
            idle_tensors=(_POOLER,),
        )


class Roberta(Bert, config=RobertaConfig):
    """RoBERTa: the layers of BERT, whose positions begin after the padding token's number."""

    prefix = "roberta."
    ignored: ClassVar[tuple[str, ...]] = ("*position_ids", "lm_head.*")

    @classmethod
    def make_head(cls, config: Any, at: Scope) -> ScoreHead:
        """Returns the head, which has two products."""
        width = config.hidden_size
        dense = projection(width, at / "classifier", ("dense", width), bias=True)
        output = projection(width, at / "classifier", ("out_proj", config.num_labels), bias=True)
        return ScoreHead(dense, jnp.tanh, output)


class XLMRobertaConfig(RobertaConfig):
    """Holds what a config.json of XLM-RoBERTa says."""

    model_type = "xlm-roberta"


class XLMRoberta(Roberta, config=XLMRobertaConfig):
    """XLM-RoBERTa, and what was trained from it: multilingual E5, BGE-M3 and its rerankers."""
