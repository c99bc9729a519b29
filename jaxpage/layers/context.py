"""The context that a step gives to its layers, besides their input and their pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Int

from jaxpage.errors import UnsupportedError
from jaxpage.layers.rope import Angles, Rope

# the layers' one word of the kernels' language
from pallas_kernels import AttentionOptions as AttentionOptions

LayerPages = (
    # what one layer keeps of tokens: opaque here, given to `attend` or `recur` and handed on as it
    # returns it
    Any
)


@runtime_checkable
class Attend(Protocol):
    """Writes new keys and values, attends with the queries, returns the output and the pages."""

    def __call__(
        self,
        layer_index: int,
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array | None,
        layer_pages: LayerPages,
        options: AttentionOptions,
        /,
    ) -> tuple[jax.Array, LayerPages]:
        """Attends causally to the own sequence: `softmax(scale * q . k) v`, with the softmax in float32.

        Keys come after the rotary embedding. Query head n uses key/value head n // (N / K).

        Args:
            layer_index: the layer's place in its model, which decides its cache group.
            v_TKH: None where the values are within the keys (`options.value_width`).
            options: handed on whole to the kernels; a tree mask is the step's to add.
        """


@dataclass(frozen=True)
class StateSpec:
    """The shapes of what a recurrent layer keeps: each token's input [input_width], and each sequence's state, in float32.

    lookback: earlier inputs that an update takes with the token's own, as far as a causal convolution reaches back.
    """

    shape: tuple[int, ...]
    input_width: int
    lookback: int


class Recurrence(NamedTuple):
    """The computation of one token of each row. A row's results must not depend on the other rows.

    prepare: the last inputs [B, 1 + lookback, E], zeros before the first one -> any arrays [B, ...].
    update: (states [B, *shape], those arrays) -> the states after the token, and outputs [B, O].
    """

    prepare: Callable[[jax.Array], Any]
    update: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]
    state: StateSpec


@runtime_checkable
class Recur(Protocol):
    """Keeps the inputs of new tokens, updates their sequence's state token by token, returns the outputs and the pages."""

    def __call__(
        self, layer_index: int, x_TE: jax.Array, recurrence: Recurrence, layer_pages: LayerPages, /
    ) -> tuple[jax.Array, LayerPages]:
        """Returns the outputs [T, O] and the pages. A sequence's state before its first token is zero."""


def no_recurrence(*_: Any) -> NoReturn:
    """Refuses recurrent layers, where a model runs that has none."""
    raise UnsupportedError("recurrent layers (linear attention) are not supported here")


@dataclass(frozen=True, eq=False)
class ForwardContext:
    """One pass of a model over a stream of tokens. It belongs to the trace in which it is made.

    aux_layers: the layers whose entering hidden states, the auxiliary ones, the model hands out (`models.base.Model`).
    """

    positions_T: Int[Array, "T"]
    attend: Attend
    aux_layers: tuple[int, ...] = ()
    recur: Recur = no_recurrence
    _angles: dict[Rope, Angles] = field(default_factory=dict, init=False, repr=False)

    def angles(self, rope: Rope) -> Angles:
        """Returns the angles of the positions, computed once for all layers that have this rope."""
        if rope not in self._angles:
            self._angles[rope] = rope.angles(self.positions_T)
        return self._angles[rope]
