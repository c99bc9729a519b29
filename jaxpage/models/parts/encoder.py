"""Computes an encoder: tables, blocks whose tokens see each other both ways, and a head.

An encoder keeps nothing between calls: no keys, no values and no pages.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers import (
    NO_ROTATION,
    Attention,
    Embedding,
    ForwardContext,
    LayerPages,
    Linear,
    Projections,
    Scores,
)
from jaxpage.layers.norms import norm_of_sum
from jaxpage.models.base import FamilyModule, KVSpec
from jaxpage.models.config import Fields
from jaxpage.models.parts.decoder_config import DecoderConfig
from jaxpage.models.parts.names import Scope

SCORES_PAIRS = "ForSequenceClassification"  # how the architecture of a cross-encoder ends
DISTANCE_BUCKETS = 32  # of T5 and MPNet
_EXACT_DISTANCES = 8  # to each side; those beyond share buckets, up to _FARTHEST
_FARTHEST = 128
HeadPooling = Literal["cls", "mean"]


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(DecoderConfig):
    """Holds what the configs of encoders say; see `models.base.ModelSpec`.

    Attributes:
        reach: For each layer, how many positions to both sides a token sees; None for all.
        token_types: The rows of the table of token types; 0 for none.
        first_position: The number of rows before those of positions (RoBERTa).
        padding_id: The token that takes no position, where `first_position` is not 0.
        has_distances: True if scores of attention have a bias by the distance of two tokens.
        num_labels: The scores that the head gives of a text; 0 for a model without a head.
        head_pooling: The state that the head takes: that of the first token, or the mean of all.
        idle_tensors: Globs over the names of tensors of heads that this model does not have.
    """

    reach: tuple[int | None, ...] = ()
    token_types: int = 0
    first_position: int = 0
    padding_id: int = 0
    has_distances: bool = False
    num_labels: int = 0
    head_pooling: HeadPooling = "cls"
    idle_tensors: tuple[str, ...] = ()

    @property
    def scores_pairs(self) -> bool:
        """Returns whether the model scores pairs of texts, and does not embed (cross-encoder)."""
        return self.num_labels > 0

    def positions_of(self, token_ids: np.typing.NDArray[np.int32]) -> np.typing.NDArray[np.int32]:
        """Returns the row of each token of a text in the table of positions."""
        if not self.first_position:
            return np.arange(len(token_ids), dtype=np.int32)
        # transformers' RoBERTa gives a padding token in the text no position of its own.
        counts = token_ids != self.padding_id
        places = np.cumsum(counts) * counts + self.first_position - 1
        return places.astype(np.int32)


def distance_buckets(most: int) -> np.typing.NDArray[np.int32]:
    """Returns the bucket of each distance from -most to most, of a key after its query.

    Short distances have a bucket each, and longer ones share them by their logarithm (T5; Raffel et
    al., 2020). Keys after the query have the second half of the buckets.

    Args:
        most: The longest distance, in tokens.
    """
    distance = np.arange(-most, most + 1)
    far = np.abs(distance)
    each_side = DISTANCE_BUCKETS // 2
    with np.errstate(divide="ignore"):
        # In float32, as in transformers: at a border the bucket depends on it.
        share = np.log(far.astype(np.float32) / _EXACT_DISTANCES)
        share = share / np.float32(np.log(_FARTHEST / _EXACT_DISTANCES))
        place = share * np.float32(each_side - _EXACT_DISTANCES)
    shared = _EXACT_DISTANCES + np.maximum(place, 0).astype(np.int32)
    bucket = np.where(far < _EXACT_DISTANCES, far, np.minimum(shared, each_side - 1))
    return (bucket + each_side * (distance > 0)).astype(np.int32)


def read_encoder(
    fields: Fields,
    *,
    num_positions: int,
    epsilon: tuple[str, float] = ("layer_norm_eps", 1e-12),
    activation: tuple[str, str] = ("hidden_act", "gelu"),
    head_dim: int | None = None,
) -> dict[str, Any]:
    """Returns the fields of an `EncoderConfig` that most configs have under the same names.

    Args:
        fields: The fields of the config.
        num_positions: The tokens of the longest text.
        epsilon: The field of the norms' epsilon, and its default.
        activation: The field of the activation, and its default.
        head_dim: The width of a head; None for that of the model over the number of heads.
    """
    fields.only(is_decoder=False, position_embedding_type="absolute")
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    head_dim = head_dim or fields.head_dim()
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_query_heads": num_heads,
        "max_position_embeddings": num_positions,
        "kv": KVSpec(0, num_heads, head_dim, (), decoder_layers=num_layers),
        "rope": NO_ROTATION,
        "reach": (None,) * num_layers,
        "norm_epsilon": fields.number(*epsilon),
        "activation": fields.activation(*activation),
        "tie_word_embeddings": False,
        "num_labels": read_num_labels(fields),
    }


def read_num_labels(fields: Fields) -> int:
    """Returns the number of scores that the head gives, 0 for an architecture without one.

    One label is a score; more of them are classes, which nothing here makes use of.
    """
    architectures = fields.get("architectures", None) or [""]
    if not str(architectures[0]).endswith(SCORES_PAIRS):
        return 0
    labels = fields.get("id2label", None)
    num_labels = len(labels) if isinstance(labels, dict) else fields.integer("num_labels", 2)
    if num_labels != 1:
        fields.note_unsupported(
            f"id2label has {num_labels} labels: only models with one, the score of a pair of "
            "texts, are supported",
            id2label=None,
            num_labels=1,
        )
    return 1


def attention_both_ways(
    config: EncoderConfig,
    index: int,
    inputs: Linear,
    output: Linear,
) -> Attention:
    """Returns attention whose tokens see each other, as far as the layer reaches.

    Args:
        config: The config of the model.
        index: The number of the layer.
        inputs: The product for queries, keys and values: three parts in this order.
        output: The product for the output.
    """
    return Attention(
        index,
        Projections(inputs, output),
        head_dim=config.kv.head_dim,
        rope=config.rope_of(index),
        scores=Scores(sliding_window=config.reach[index]),
    )


class PostNormBlock(nnx.Module):
    """Computes `y = norm(x + attention(x))`, then `norm(y + mlp(y))` (Vaswani et al., 2017)."""

    def __init__(self, attention: Attention, attention_norm: Any, mlp: Any, mlp_norm: Any):
        """Makes the block of its halves and of the norms of their sums with the input."""
        self.attention = attention
        self.attention_norm = attention_norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages; see `Block`."""
        attended_TD, layer_pages = self.attention(x_TD, layer_pages, context)
        y_TD = norm_of_sum(self.attention_norm, x_TD, attended_TD)
        return norm_of_sum(self.mlp_norm, y_TD, self.mlp(y_TD)), layer_pages


class ScoreHead(nnx.Module):
    """Computes the score of a text from one state: two products, with a function in between."""

    def __init__(
        self,
        dense: Linear,
        function: Callable[[jax.Array], jax.Array],
        output: Linear,
        norm: Any | None = None,
    ):
        """Makes the head; `norm` follows the function."""
        self.dense = dense
        self.function = function
        self.norm = norm
        self.output = output

    def __call__(self, pooled_RD: Float[Array, "R D"]) -> Float[Array, "R Z"]:
        """Returns the scores in float32."""
        inner_RD = self.function(self.dense(pooled_RD))
        if self.norm is not None:
            inner_RD = self.norm(inner_RD)
        return self.output(inner_RD).astype(jnp.float32)


class Encoder(FamilyModule):
    """Computes an encoder.

        class Bert(Encoder, config=BertConfig): ...

    A family makes its tables, its block (`PostNormBlock` or `Block`) and its head.
    """

    prefix = ""
    layers_name: ClassVar[str] = "encoder.layer"

    def __init__(self, config: Any, *, dtype: jax.typing.DTypeLike):
        at = Scope(config.name, dtype)
        self.config = config
        self.tokens, self.positions, self.types = self.make_tables(config, at)
        self.distances = self.make_distances(config, at)
        self.table_norm: Any = self.make_table_norm(config, at)
        self.layers = nnx.List(
            self.make_block(config, index, at / f"{self.layers_name}.{index}")
            for index in range(config.num_layers)
        )
        self.norm: Any = self.make_norm(config, at)
        self.head = self.make_head(config, Scope("", dtype)) if config.num_labels else None

    @classmethod
    @abstractmethod
    def make_tables(
        cls, config: Any, at: Scope
    ) -> tuple[Embedding, Embedding | None, Embedding | None]:
        """Returns the tables of tokens, positions and token types; None for one not there."""

    @classmethod
    def make_distances(cls, config: Any, at: Scope) -> Embedding | None:
        """Returns the biases of scores by distance; None for a model without them."""
        return None

    @classmethod
    @abstractmethod
    def make_table_norm(cls, config: Any, at: Scope) -> Any:
        """Returns the norm of the sum of the rows of all tables."""

    @classmethod
    @abstractmethod
    def make_block(cls, config: Any, index: int, at: Scope) -> nnx.Module:
        """Returns a layer; see `Decoder.make_block`."""

    @classmethod
    @abstractmethod
    def make_head(cls, config: Any, at: Scope) -> ScoreHead:
        """Returns the head of a model that scores pairs."""

    @classmethod
    def make_norm(cls, config: Any, at: Scope) -> Any | None:
        """Returns the norm after the last layer; None if there is none."""
        return None

    def __call__(
        self,
        token_ids_T: Int[Array, "T"],
        token_types_T: Int[Array, "T"],
        context: ForwardContext,
    ) -> Float[Array, "T D"]:
        """Returns the state of each token after the last layer."""
        hidden_TD = self.tokens(token_ids_T)
        if self.types is not None:
            hidden_TD = hidden_TD + self.types(token_types_T)
        if self.positions is not None:
            hidden_TD = hidden_TD + self.positions(context.positions_T)
        hidden_TD = self.table_norm(hidden_TD)
        for layer in self.layers:
            hidden_TD, _ = layer(hidden_TD, (), context)
        return hidden_TD if self.norm is None else self.norm(hidden_TD)

    def score(self, pooled_RD: Float[Array, "R D"]) -> Float[Array, "R Z"]:
        """Returns the scores of texts in float32, given the state that the head takes of each."""
        assert self.head is not None, "only models with a head score"
        return self.head(pooled_RD)
