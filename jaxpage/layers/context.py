"""Defines the context that a step gives to its layers, with their input and their pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpage.errors import UnsupportedError
from jaxpage.layers.rope import Angles, Rope

# Layers import it from here: it is the only name of the kernels that they use.
from pallas_kernels import AttentionOptions as AttentionOptions

LayerPages = (
    # The content of one layer's caches is opaque here: a layer passes it to `attend` or `recur` and
    # returns what they return.
    Any
)


@runtime_checkable
class Attend(Protocol):
    """Writes new keys and values, attends with the queries, returns the output and the pages."""

    def __call__(
        self,
        layer_index: int,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        layer_pages: LayerPages,
        options: AttentionOptions,
        /,
    ) -> tuple[jax.Array, LayerPages]:
        """Attends causally to the own sequence: `softmax(scale * q . k) v`, the softmax in float32.

        Keys come after the rotary embedding. Query head n uses key/value head n // (N / K).

        Args:
            layer_index: The layer of the cache whose pages are read, which decides the cache
                group. It is that of another layer of the model where both share keys and values.
            q_TNH: The queries.
            k_TKH: The keys; None where the layer before it with these pages has written them.
            v_TKH: The values; None where they are within the keys (`options.value_width`).
            layer_pages: The pages of this layer.
            options: The options, which the kernels get as they are. The step adds a tree mask to
                them.
        """


class HeadScales(NamedTuple):
    """Holds RMS norms of each head of queries and keys.

    Attributes:
        query_scale_H: The scale of queries.
        key_scale_H: The scale of keys.
        epsilon: The number that is added to the mean of squares.
        offset: The number that is added to the scales.
    """

    query_scale_H: jax.Array
    key_scale_H: jax.Array
    epsilon: float
    offset: float


@runtime_checkable
class RotateAndWrite(Protocol):
    """Splits heads into queries, keys and values, rotates the first two, and writes the others."""

    def __call__(
        self,
        layer_index: int,
        x_TF: jax.Array,
        head_dim: int,
        angles: Angles,
        layer_pages: LayerPages,
        norms: HeadScales | None,
        /,
    ) -> tuple[jax.Array, LayerPages] | None:
        """Returns the queries, with which `Attend` reads the pages; None where no kernel does that.

        Args:
            layer_index: See `Attend`.
            x_TF: The heads of queries, keys and values, in this order.
            head_dim: The width of a head.
            angles: The angles by which the pairs of queries and keys turn.
            layer_pages: The pages of this layer.
            norms: The norms of queries and keys before they turn; None for none.
        """


@dataclass(frozen=True)
class StateSpec:
    """Describes what a recurrent layer keeps: each token's input, and each sequence's state.

    Attributes:
        shape: The shape of a sequence's state, which is in float32; None if there is no state, only
            a convolution.
        input_width: The width of a token's input.
        lookback: The number of earlier inputs that an update takes with the token's own: the reach
            of a causal convolution.
    """

    shape: tuple[int, ...] | None
    input_width: int
    lookback: int


class Recurrence(NamedTuple):
    """Computes one token of each row. The results of a row must not depend on the other rows.

    Attributes:
        prepare: Takes the last inputs [B, 1 + lookback, E], with zeros before the first one, and
            returns any arrays [B, ...]; without a state, the outputs [B, O].
        update: Takes the states [B, *shape] and those arrays, and returns the states after the
            token and the outputs [B, O]; None without a state.
        state: The shapes of the state.
    """

    prepare: Callable[[jax.Array], Any]
    update: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]] | None
    state: StateSpec


@runtime_checkable
class Recur(Protocol):
    """Keeps the inputs of new tokens and updates the state of their sequence token by token."""

    def __call__(
        self, layer_index: int, x_TE: jax.Array, recurrence: Recurrence, layer_pages: LayerPages, /
    ) -> tuple[jax.Array, LayerPages]:
        """Returns the outputs [T, O] and the pages. The state before the first token is zero."""


def no_recurrence(*_: Any) -> NoReturn:
    """Raises UnsupportedError; it takes the place of `recur` where no recurrent layer can run."""
    raise UnsupportedError("recurrent layers (linear attention) are not supported here")


@dataclass(frozen=True, eq=False)
class ForwardContext:
    """Describes one pass of a model over a stream of tokens. It belongs to the trace that made it.

    Attributes:
        positions_T: The position of each token in its sequence.
        attend: The operation that attention layers call.
        aux_layers: The layers before which the model takes the hidden states that it returns as
            auxiliary ones (`models.base.Model`).
        recur: The operation that recurrent layers call.
        rotate_and_write: The operation that takes the place of a rotation and of the writes of
            `attend`, where a kernel does both; None where none does.
        vectors: Which tokens vectors take the place of, and these vectors [T, D]; None for none.
        axes_AT: The positions by which pairs of heads turn, on several axes (see `Rope`); None if
            `positions_T` are these too.
        deep_nTD: What is added to the outputs of the first n layers: features of pictures, and zero
            for the other tokens (DeepStack); None for nothing.
    """

    positions_T: Int[Array, "T"]
    attend: Attend
    aux_layers: tuple[int, ...] = ()
    recur: Recur = no_recurrence
    rotate_and_write: RotateAndWrite | None = None
    vectors: tuple[Bool[Array, "T"], Float[Array, "T D"]] | None = None
    axes_AT: Int[Array, "A T"] | None = None
    deep_nTD: Float[Array, "n T D"] | None = None
    # Arrays of a trace must not be used after it, so they are kept here and not in the layers.
    _angles: dict[Rope, Angles] = field(default_factory=dict, init=False, repr=False)

    def angles(self, rope: Rope) -> Angles:
        """Returns the angles of the positions, computed once for all layers that have this rope."""
        if rope not in self._angles:
            # A model may have layers that turn by one axis, whatever pictures the prompt has.
            axes_AT = self.axes_AT if rope.axes else None
            self._angles[rope] = rope.angles(self.positions_T if axes_AT is None else axes_AT)
        return self._angles[rope]

    def place_vectors(self, embedded_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns the token table's rows, and the vectors where these take their place."""
        if self.vectors is None:
            return embedded_TD
        is_vector_T, vectors_TD = self.vectors
        return jnp.where(is_vector_T[:, None], vectors_TD.astype(embedded_TD.dtype), embedded_TD)
