"""Holds the lineage of BERT (Devlin et al., 2019): encoders of texts and of pairs of texts.

BERT and RoBERTa have learned positions, and norms after each half of a layer. MPNet adds a bias by
the distance of two tokens; NomicBERT has rotations and gates; ModernBERT has norms before each
half, rotations, gates, and windows to both sides.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from jaxpage.layers import ACTIVATIONS, Embedding
from jaxpage.models.config import Fields
from jaxpage.models.parts import Block, Scope, attention, encoder, encoder_config, mlp, norms
from jaxpage.models.parts.decoder import PostNormBlock
from jaxpage.models.parts.names import AttentionNames, MLPNames

_POOLER = "*pooler.dense.*"
_MPNET_PADDING_ID = 1  # whatever config.json says
# The activation is that of the second product in the file.
_NOMIC_MLP = MLPNames("mlp", "fc12", "fc11", "fc2", None)
_MODERN_MLP = MLPNames("mlp", None, None, "Wo", "Wi")
_MODERN_FULL = "full_attention"
_MODERN_THETA = {
    _MODERN_FULL: ("global_rope_theta", 160_000.0),
    "sliding_attention": ("local_rope_theta", 1e4),
}


@dataclass(frozen=True, kw_only=True)
class BertConfig(encoder_config.EncoderConfig):
    """Holds what a config.json of BERT says."""

    model_type = "bert"
    head_tensors = (_POOLER,)

    name: str = "bert"

    @classmethod
    def read(cls, fields: Fields) -> BertConfig:
        """Reads the fields."""
        return cls.from_fields(
            fields,
            num_positions=fields.integer("max_position_embeddings", 512),
            token_types=fields.integer("type_vocab_size", 2),
        )


class Bert(encoder.Encoder, config=BertConfig):
    """BERT, and what was trained from it: MiniLM, E5, BGE, GTE, cross-encoders of MS MARCO."""

    prefix = "bert."
    ignored: ClassVar[tuple[str, ...]] = ("*position_ids", "cls.*")
    # Files that were converted from TensorFlow have these names.
    renamed: ClassVar[Mapping[str, str]] = {
        "LayerNorm.weight": "LayerNorm.gamma",
        "LayerNorm.bias": "LayerNorm.beta",
    }
    has_positions: ClassVar[bool] = True  # True if there is a table of learned positions
    # The products of attention, and the norm after it.
    attention_names: ClassVar[AttentionNames] = AttentionNames(
        "attention.output.dense",
        inputs=("attention.self.query", "attention.self.key", "attention.self.value"),
    )
    attention_norm: ClassVar[str] = "attention.output.LayerNorm"

    @classmethod
    def make_tables(cls, config: Any, at: Scope) -> encoder.Tables:
        """Returns the tables of tokens, positions and token types."""
        tables = at / "embeddings"
        width = config.hidden_size
        num_positions = config.num_rows_before + config.max_position_embeddings

        def table(rows: int, name: str, axis: str | None = None) -> Embedding:
            return Embedding(rows, width, name=(tables / name).name, axis=axis, dtype=at.dtype)

        return (
            table(config.vocab_size, "word_embeddings", "vocab"),
            table(num_positions, "position_embeddings") if cls.has_positions else None,
            table(config.token_types, "token_type_embeddings") if config.token_types else None,
        )

    @classmethod
    def make_table_norm(cls, config: Any, at: Scope) -> Any:
        """Returns the norm of the sum of the tables' rows."""
        return norms.layer_norm(config, at / "embeddings.LayerNorm")

    @classmethod
    def make_block(cls, config: Any, index: int, layer: Scope) -> PostNormBlock:
        """Returns a layer."""
        return PostNormBlock(
            attention=attention.grouped_query_attention(
                config, index, layer, names=cls.attention_names
            ),
            attention_norm=norms.layer_norm(config, layer / cls.attention_norm),
            mlp=mlp.plain_mlp(config, layer, "intermediate.dense", "output.dense"),
            mlp_norm=norms.layer_norm(config, layer / "output.LayerNorm"),
        )

    @classmethod
    def make_head(cls, config: Any, at: Scope) -> encoder.ScoreHead:
        """Returns the pooler and the classifier."""
        width = config.hidden_size
        dense = (at / config.name / "pooler").projection(width, ("dense", width), bias=True)
        output = at.projection(width, ("classifier", 1), bias=True)
        return encoder.ScoreHead(dense, jnp.tanh, output)


@dataclass(frozen=True, kw_only=True)
class RobertaConfig(encoder_config.EncoderConfig):
    """Holds what a config.json of RoBERTa says."""

    model_type = "roberta"

    name: str = "roberta"

    @classmethod
    def read(cls, fields: Fields) -> RobertaConfig:
        """Reads the fields; the rows of positions begin after that of the padding token."""
        padding_id = fields.integer("pad_token_id", 1, minimum=0)
        rows = fields.integer("max_position_embeddings", 512, minimum=padding_id + 2)
        return cls.from_fields(
            fields,
            num_positions=rows - padding_id - 1,
            token_types=fields.integer("type_vocab_size", 2),
            padding_id=padding_id,
        )


class Roberta(Bert, config=RobertaConfig):
    """RoBERTa: the layers of BERT, whose positions begin after the padding token's number."""

    prefix = "roberta."
    # A model with a head lacks the pooler, too.
    ignored: ClassVar[tuple[str, ...]] = ("*position_ids", "lm_head.*", _POOLER)

    @classmethod
    def make_head(cls, config: Any, at: Scope) -> encoder.ScoreHead:
        """Returns the head, which has two products."""
        width = config.hidden_size
        dense = (at / "classifier").projection(width, ("dense", width), bias=True)
        output = (at / "classifier").projection(width, ("out_proj", 1), bias=True)
        return encoder.ScoreHead(dense, jnp.tanh, output)


class XLMRobertaConfig(RobertaConfig):
    """Holds what a config.json of XLM-RoBERTa says."""

    model_type = "xlm-roberta"


class XLMRoberta(Roberta, config=XLMRobertaConfig):
    """XLM-RoBERTa, and what was trained from it: multilingual E5, BGE-M3 and its rerankers."""


@dataclass(frozen=True, kw_only=True)
class MPNetConfig(encoder_config.EncoderConfig):
    """Holds what a config.json of MPNet says."""

    model_type = "mpnet"
    has_distances = True

    name: str = "mpnet"

    @classmethod
    def read(cls, fields: Fields) -> MPNetConfig:
        """Reads the fields; the rows of positions begin after that of the padding token."""
        fields.only(relative_attention_num_buckets=encoder_config.DISTANCE_BUCKETS)
        rows = fields.integer("max_position_embeddings", 512, minimum=_MPNET_PADDING_ID + 2)
        return cls.from_fields(
            fields, num_positions=rows - _MPNET_PADDING_ID - 1, padding_id=_MPNET_PADDING_ID
        )


class MPNet(Roberta, config=MPNetConfig):
    """MPNet, and what was trained from it: all-mpnet-base, multi-qa-mpnet, paraphrase-mpnet."""

    prefix = "mpnet."
    attention_names = AttentionNames(
        "attention.attn.o", inputs=("attention.attn.q", "attention.attn.k", "attention.attn.v")
    )
    attention_norm = "attention.LayerNorm"

    @classmethod
    def make_distances(cls, config: Any, at: Scope) -> Embedding:
        """Returns the table of biases, a row for each bucket of distances and a column a head."""
        name = (at / "encoder.relative_attention_bias").name
        heads = config.num_query_heads
        return Embedding(
            encoder_config.DISTANCE_BUCKETS, heads, name=name, axis=None, dtype=at.dtype
        )


@dataclass(frozen=True, kw_only=True)
class NomicBertConfig(encoder_config.EncoderConfig):
    """Holds what a config.json of NomicBERT says."""

    model_type = "nomic_bert"

    name: str = "nomic_bert"

    @classmethod
    def read(cls, fields: Fields) -> NomicBertConfig:
        """Reads the fields."""
        head_dim = fields.head_dim()
        positions = fields.integer("max_position_embeddings", 2048)
        rope, length = fields.rope(head_dim, positions, theta=1000.0)
        return cls.from_fields(
            fields,
            num_positions=length,
            activation=("hidden_act", "silu"),
            head_dim=head_dim,
            rope=rope,
            token_types=fields.integer("type_vocab_size", 2),
            attention_bias=False,
            mlp_bias=False,
        )


class NomicBert(Bert, config=NomicBertConfig):
    """NomicBERT of nomic-embed-text: BERT with rotations and gates, and without most biases."""

    prefix = "nomic_bert."
    layers_name = "encoder.layers"
    ignored: ClassVar[tuple[str, ...]] = ("*position_ids", "*token_type_ids", "cls.*", _POOLER)
    renamed: ClassVar[Mapping[str, str]] = {}
    has_positions = False

    @classmethod
    def make_table_norm(cls, config: Any, at: Scope) -> Any:
        """Returns the norm of the sum of the tables' rows."""
        return norms.layer_norm(config, at / "emb_ln")

    @classmethod
    def make_block(cls, config: Any, index: int, layer: Scope) -> PostNormBlock:
        """Returns a layer."""
        names = AttentionNames("out_proj", fused="Wqkv", in_groups=False)
        return PostNormBlock(
            attention=attention.grouped_query_attention(config, index, layer / "attn", names=names),
            attention_norm=norms.layer_norm(config, layer / "norm1"),
            mlp=mlp.gated_mlp(config, layer / "mlp", names=_NOMIC_MLP),
            mlp_norm=norms.layer_norm(config, layer / "norm2"),
        )


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(encoder_config.EncoderConfig):
    """Holds what a config.json of ModernBERT says.

    Attributes:
        norm_bias: True if norms have biases.
    """

    model_type = "modernbert"
    head_tensors = ("head.*", "classifier.*")

    name: str = "model"
    norm_bias: bool = False

    @classmethod
    def read(cls, fields: Fields) -> ModernBertConfig:
        """Reads the fields."""
        fields.only(rope_scaling=None)
        num_layers = fields.integer("num_hidden_layers")
        every = fields.integer("global_attn_every_n_layers", 3)
        kinds = fields.layer_types(
            ["sliding_attention" if index % every else _MODERN_FULL for index in range(num_layers)]
        )
        positions = fields.integer("max_position_embeddings", 8192)
        ropes, length = fields.ropes_by_type(fields.head_dim(), positions, _MODERN_THETA)
        reach = fields.integer("local_attention", 128) // 2
        config = cls.from_fields(
            fields,
            num_positions=length,
            epsilon=("norm_eps", 1e-5),
            activation=("hidden_activation", "gelu"),
            rope_by_layer=tuple(ropes[kind] for kind in kinds),
            reach=tuple(None if kind == _MODERN_FULL else reach for kind in kinds),
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            norm_bias=fields.flag("norm_bias", False),
        )
        head = encoder_config.ScoreForm(
            pooling=_read_head_pooling(fields),
            bias=fields.flag("classifier_bias", False),
            activation=fields.activation("classifier_activation", "gelu"),
        )
        return replace(config, head=config.head and head)


def _read_head_pooling(fields: Fields) -> Literal["cls", "mean"]:
    stated = fields.get("classifier_pooling", "cls")
    if stated == "mean":
        return "mean"
    if stated != "cls":
        text = f"classifier_pooling must be cls or mean, not {stated!r}"
        fields.note_wrong(text, classifier_pooling="cls")
    return "cls"


class ModernBert(encoder.Encoder, config=ModernBertConfig):
    """ModernBERT, and what was trained from it: GTE and Granite encoders, and their rerankers."""

    prefix = "model."
    ignored: ClassVar[tuple[str, ...]] = ("decoder.*",)
    layers_name = "layers"

    @classmethod
    def make_tables(cls, config: Any, at: Scope) -> encoder.Tables:
        """Returns the table of tokens, which is alone."""
        name = (at / "embeddings.tok_embeddings").name
        table = Embedding(config.vocab_size, config.hidden_size, name=name, dtype=at.dtype)
        return table, None, None

    @classmethod
    def make_table_norm(cls, config: Any, at: Scope) -> Any:
        """Returns the norm of the rows of the table."""
        return norms.layer_norm(config, at / "embeddings.norm", bias=config.norm_bias)

    @classmethod
    def make_final_norm(cls, config: Any, at: Scope) -> Any:
        """Returns the norm after the last layer."""
        return norms.layer_norm(config, at / "final_norm", bias=config.norm_bias)

    @classmethod
    def make_block(cls, config: Any, index: int, layer: Scope) -> Block:
        """Returns a layer; the first one has no norm before its attention."""
        names = AttentionNames("Wo", fused="Wqkv", in_groups=False)
        norm = functools.partial(norms.layer_norm, bias=config.norm_bias)
        return Block(
            attention_norm=norm(config, layer / "attn_norm") if index else None,
            attention=attention.grouped_query_attention(config, index, layer / "attn", names=names),
            mlp_norm=norm(config, layer / "mlp_norm"),
            mlp=mlp.gated_mlp(config, layer / "mlp", names=_MODERN_MLP),
        )

    @classmethod
    def make_head(cls, config: Any, at: Scope) -> encoder.ScoreHead:
        """Returns the head: a product, its function and norm, and the classifier."""
        width = config.hidden_size
        return encoder.ScoreHead(
            (at / "head").projection(width, ("dense", width), bias=config.head.bias),
            ACTIVATIONS[config.head.activation],
            at.projection(width, ("classifier", 1), bias=True),
            norms.layer_norm(config, at / "head.norm", bias=config.norm_bias),
        )
