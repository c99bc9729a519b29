"""Computes an encoder: tables, blocks whose tokens see each other both ways, and a head.

An encoder keeps nothing between calls: no keys, no values and no pages.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.layers import Embedding, ForwardContext, Linear
from jaxpage.models.base import FamilyModule
from jaxpage.models.parts.names import Scope


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
        return self.output(inner_RD).astype(jax.numpy.float32)


# The tables of tokens, positions and token types; None for one that is not there.
Tables = tuple[Embedding, Embedding | None, Embedding | None]


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
        self.norm: Any = self.make_final_norm(config, at)
        self.head = self.make_head(config, Scope("", dtype)) if config.scores_pairs else None

    @classmethod
    @abstractmethod
    def make_tables(cls, config: Any, at: Scope) -> Tables:
        """Returns the tables of tokens, positions and token types."""

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
    def make_block(cls, config: Any, index: int, layer: Scope) -> nnx.Module:
        """Returns a layer; see `Decoder.make_block`."""

    @classmethod
    @abstractmethod
    def make_head(cls, config: Any, at: Scope) -> ScoreHead:
        """Returns the head of a model that scores pairs."""

    @classmethod
    def make_final_norm(cls, config: Any, at: Scope) -> Any | None:
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
            # Blocks of decoders return pages, too, of which an encoder has none.
            hidden_TD, _ = layer(hidden_TD, (), context)
        return hidden_TD if self.norm is None else self.norm(hidden_TD)

    def score(self, pooled_RD: Float[Array, "R D"]) -> Float[Array, "R Z"]:
        """Returns the scores of texts in float32, given the state that the head takes of each."""
        assert self.head is not None, "only models with a head score"
        return self.head(pooled_RD)
