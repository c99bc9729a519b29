"""Holds NomicBERT (Nussbaum et al., 2024): BERT with rotations and gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxpage.layers.attention import query_key_value
from jaxpage.layers.embedding import Embedding
from jaxpage.models.bert import Bert
from jaxpage.models.config.fields import Fields
from jaxpage.models.parts.decoder_config import read_head_dim
from jaxpage.models.parts.encoder import (
    EncoderConfig,
    PostNormBlock,
    attention_both_ways,
    read_encoder,
)
from jaxpage.models.parts.mlp import MLPNames, gated_mlp
from jaxpage.models.parts.norms import layer_norm
from jaxpage.models.parts.projection import projection
from jaxpage.models.parts.scope import Scope

# The activation is that of the second product in the file.
_MLP = MLPNames("mlp", "fc12", "fc11", "fc2", None)


@dataclass(frozen=True, kw_only=True)
class NomicBertConfig(EncoderConfig):
    """Holds what a config.json of NomicBERT says."""

    model_type = "nomic_bert"

    name: str = "nomic_bert"

    @classmethod
    def read(cls, fields: Fields) -> NomicBertConfig:
        """Reads the fields."""
        head_dim = read_head_dim(fields)
        positions = fields.integer("max_position_embeddings", 2048)
        common = read_encoder(
            fields, num_positions=positions, activation=("hidden_act", "silu"), head_dim=head_dim
        )
        rope, length = fields.rope(head_dim, positions, theta=1000.0)
        common |= {"rope": rope, "max_position_embeddings": length}
        return cls(
            **common,
            token_types=fields.integer("type_vocab_size", 2),
            idle_tensors=("*pooler.dense.*",),
        )


class NomicBert(Bert, config=NomicBertConfig):
    """NomicBERT of nomic-embed-text: BERT with rotations and gates, and without most biases."""

    prefix = "nomic_bert."
    layers_name = "encoder.layers"
    ignored: ClassVar[tuple[str, ...]] = ("*position_ids", "*token_type_ids", "cls.*")
    renamed: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def make_tables(
        cls, config: Any, at: Scope
    ) -> tuple[Embedding, Embedding | None, Embedding | None]:
        """Returns the tables of tokens and of token types."""
        tokens, types = (
            Embedding(rows, config.hidden_size, name=(at / name).name, axis=axis, dtype=at.dtype)
            for rows, name, axis in (
                (config.vocab_size, "embeddings.word_embeddings", "vocab"),
                (config.token_types, "embeddings.token_type_embeddings", None),
            )
        )
        return tokens, None, types

    @classmethod
    def make_table_norm(cls, config: Any, at: Scope) -> Any:
        """Returns the norm of the sum of the tables' rows."""
        return layer_norm(config, at / "emb_ln")

    @classmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> PostNormBlock:
        """Returns a layer."""
        width = config.hidden_size
        inner = config.num_query_heads * config.kv.head_dim
        attention = at / "attn"
        inputs = query_key_value(
            width, inner, inner, name=attention.name, fused="Wqkv", bias=False, dtype=at.dtype
        )
        output = projection(inner, attention, ("out_proj", width), axes=("heads", "embed"))
        return PostNormBlock(
            attention_both_ways(config, index, inputs, output),
            layer_norm(config, at / "norm1"),
            gated_mlp(config, at / "mlp", names=_MLP),
            layer_norm(config, at / "norm2"),
        )
