"""Keeps the scope of a trace: one record, in the only context variable that layers read.

It has what linear layers take from a step. Attention and feed-forward layers of every family call
these with nothing but their input, and would all have to pass such values on. The values that a
step gives to a layer by name are in `ForwardContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jaxpage.layers.producers import MadeBySegments, Producers
from jaxpage.layers.weight_kinds import Grouped, Packed, PackedCodes


class MultiplyPacked(Protocol):
    """Multiplies by weights in panels."""

    def __call__(
        self,
        x_TI: jax.Array,
        weight: Packed | PackedCodes,
        result: DTypeLike,
        count_E: jax.Array | None,
        bias_O: jax.Array | None = None,
        activation: str | None = None,
    ) -> jax.Array:
        """Returns `activation(x @ weight.T + bias)`.

        Args:
            x_TI: The rows.
            weight: The weight.
            result: The type of the result.
            count_E: The number of rows of each group, where rows are sorted by group and each group
                has its own weight; None for one weight.
            bias_O: The bias of a `Packed` weight; None for none.
            activation: The function that follows such a weight, one of `rows.ACTIVATIONS`.
        """


class RowKernels(NamedTuple):
    """Holds kernels for what layers compute between products, row by row.

    Each is one call in place of what the layer says in jnp. See `pallas_kernels.cpu.rows`.

    Attributes:
        takes: Returns whether there are kernels for numbers of a type.
        gate: Returns an activation of gates times ups; its name is one of `rows.ACTIVATIONS`.
        rms_norm: Returns rows with an RMS norm, of x, the scale, epsilon and the offset of scales.
        add_and_norm: Returns the sum of x and another array, and `rms_norm` of the sum.
        layer_norm: Returns rows with a layer norm, and the sum of x and another array before it.
        rotate: Returns x with its pairs rotated, of x, cosines and sines.
        split_and_rotate: Returns queries, keys and values of rows that have them, the first two
            rotated, of the rows, cosines, sines, the number of keys and the width of a head.
        scores: Returns the scores of a router's experts, of the logits; with `sigmoid=True`
            sigmoids, else exponentials. None where XLA computes them.
        weighted_sum: Returns the sum of a token's rows with their weights, of arrays [T, X, D] and
            [T, X]; None like `scores`.
        rotate_pairs: Returns what `rotate` does for pairs that are neighbours; None like `scores`.
        update_state: Returns what `state_update.update_state` does; None like `scores`.
        convolve: Returns the sum over places of arrays [B, W, C] and [W, C], and of a bias [C] or
            None; None like `scores`.
    """

    takes: Callable[[DTypeLike], bool]
    gate: Callable[[jax.Array, str], jax.Array]
    rms_norm: Callable[[jax.Array, jax.Array, float, float], jax.Array]
    add_and_norm: Callable[
        [jax.Array, jax.Array, jax.Array, float, float], tuple[jax.Array, jax.Array]
    ]
    layer_norm: Callable[..., tuple[jax.Array | None, jax.Array]]
    rotate: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    split_and_rotate: Callable[
        [jax.Array, jax.Array, jax.Array, int, int], tuple[jax.Array, jax.Array, jax.Array]
    ]
    scores: Callable[..., jax.Array] | None = None
    weighted_sum: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    rotate_pairs: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None
    update_state: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    convolve: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array] | None = None


class LayerKernels(NamedTuple):
    """Holds the kernels of layers, which `jaxpage/device/` binds: most multiply by weights.

    Attributes:
        multiply: Returns `x @ weight.T` in the type that is given.
        numbers: Returns the weight in float32 [O, I].
        multiply_packed: Multiplies by weights in panels.
        packed_rows: Returns rows of a weight in panels.
        by_group: Returns `pallas_kernels.grouped_matmul` of x, weight and counts, in the type that
            is given, or None for a product that it does not take. It is None where there is no such
            kernel.
        rows: The kernels for what is between products; None where XLA computes it.
        attend_bidirectional: Returns what `pallas_kernels.cpu.bidirectional` computes of queries,
            keys, values and segments, or None for heads that it does not take. It is None where
            there is no such kernel.
        multiply_numbers: Returns `x @ weight.T` for a weight of numbers, in the type that is given.
            It is None where XLA multiplies.
        multiply_heads: Returns the products [T, N, O] of the heads of x [T, N, I] with their
            weights [N, O, I]. It is None like `multiply_numbers`.
        run_fusion: Returns what some `layers.fusion.Stage` make of x, each of what the one before
            it made, with the epsilon and the offset of norms. An `AddAndNorm` makes the sum, then
            the norm. It is None where no kernel computes several in one call.
        choose_experts: Returns what `pallas_kernels.expert_routing.choose_experts` does. It is None
            like `by_group`.
        gather_by_group: Returns what `pallas_kernels.expert_routing.gather_by_group` does, or None
            for pairs that it does not take. It is None like `by_group`.
    """

    multiply: Callable[[jax.Array, Grouped, DTypeLike], jax.Array]
    numbers: Callable[[Grouped], jax.Array]
    multiply_packed: MultiplyPacked
    packed_rows: Callable[[Packed | PackedCodes, jax.Array], jax.Array]
    by_group: (
        Callable[[jax.Array, jax.Array | Grouped, jax.Array, DTypeLike], jax.Array | None] | None
    )
    rows: RowKernels | None = None
    attend_bidirectional: Callable[..., jax.Array | None] | None = None
    multiply_numbers: Callable[[jax.Array, jax.Array, DTypeLike], jax.Array] | None = None
    multiply_heads: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    run_fusion: Callable[[jax.Array, Sequence[Any], float, float], Sequence[jax.Array]] | None = (
        None
    )
    choose_experts: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    gather_by_group: Callable[[jax.Array, jax.Array, int], tuple[jax.Array, ...] | None] | None = (
        None
    )


class TokenAdapters(NamedTuple):
    """Holds the LoRA adapters of the tokens of a pass."""

    slot_T: Int[Array, "T"]  # 0 for none
    present: Int[Array, "L"]  # the slots that any token has, from 1; then the others
    # An int, where it is known before the trace, gives the loop over adapters a derivative.
    num_present: Int[Array, ""] | int


def adapters_of(slot_T: Int[Array, "T"], num_slots: int) -> TokenAdapters:
    """Returns the adapters of tokens that have them in these slots, of `num_slots` in all."""
    slots = jnp.arange(1, num_slots + 1)
    is_present = (slot_T[:, None] == slots).any(axis=0)
    return TokenAdapters(slot_T, slots[jnp.argsort(~is_present, stable=True)], is_present.sum())


class Routes:
    """Notes which experts the routers of a pass choose, or says which of them to choose.

    Attributes:
        chosen: The experts of each token, by router, in the order in which these are traced.
    """

    def __init__(self, requested: Sequence[jax.Array] | None = None) -> None:
        """Begins a pass.

        Args:
            requested: The experts to choose, by router; None if the routers decide.
        """
        self.chosen: list[jax.Array] = []
        self._requested = requested

    def request(self) -> jax.Array | None:
        """Returns the experts [T, X] that the next router is to choose; None if it decides."""
        # Each router adds its choice to `chosen`, also one that was requested, so this is its
        # number.
        return None if self._requested is None else self._requested[len(self.chosen)]


@dataclass(frozen=True, eq=False)
class TraceScope:
    """Holds what all layers share that are traced in one pass of a model. It belongs to that trace.

    Attributes:
        kernels: The kernels of layers; None where there are none: then no weight may be a
            `Grouped` one.
        adapters: The adapters of the tokens; None for a model without LoRA layers.
        divided_logits: True if each device keeps the logits of its part of the vocabulary, and none
            gathers them.
        routes: The experts that routers choose; None where nobody asks for them.
        producers: The operations that made the arrays of the trace, for calls that compute some of
            them, too.
    """

    kernels: LayerKernels | None = None
    adapters: TokenAdapters | None = None
    divided_logits: bool = False
    routes: Routes | None = None
    producers: Producers = field(default_factory=Producers, init=False, repr=False)

    def segments_of(self, matmul_TO: jax.Array) -> jax.Array:
        """Returns the sums [Z, T, O] of which an array is the rounded sum, or the array itself."""
        segments = self.producers.find(matmul_TO, MadeBySegments)
        return matmul_TO if segments is None else segments.sums_ZTO

    @contextmanager
    def open(self) -> Iterator[None]:
        """Gives this scope to the layers that are traced inside."""
        token = _scope.set(self)
        try:
            yield
        finally:
            _scope.reset(token)


# B039: the record is frozen.
_scope: ContextVar[TraceScope] = ContextVar("trace_scope", default=TraceScope())  # noqa: B039


def trace_scope() -> TraceScope:
    """Returns the scope that was opened last; an empty one if none is open."""
    return _scope.get()


def row_kernels(dtype: DTypeLike) -> RowKernels | None:
    """Returns the kernels for rows of this type; None where XLA computes what they would."""
    kernels = trace_scope().kernels
    if kernels is None or kernels.rows is None or not kernels.rows.takes(dtype):
        return None
    return kernels.rows
