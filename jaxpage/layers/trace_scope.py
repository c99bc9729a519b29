"""Keeps the scope of a trace: one record, in the only context variable that layers read.

It has what linear layers take from a step. Attention and feed-forward layers of every family call
these with nothing but their input, and would all have to pass such values on. The values that a
step gives to a layer by name are in `ForwardContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jaxpage.layers.weight_kinds import Grouped, Packed, PackedCodes


class RowKernels(NamedTuple):
    """Holds kernels for what layers compute between products, row by row.

    Each is one call in place of what the layer says in jnp. See `pallas_kernels.cpu.rows`.

    Attributes:
        takes: Returns whether there are kernels for numbers of a type.
        gate: Returns an activation of gates times ups; its name is one of `rows.ACTIVATIONS`.
        rms_norm: Returns rows with an RMS norm, of x, the scale, epsilon and the offset of scales.
        add_and_norm: Returns the sum of x and another array, and `rms_norm` of the sum.
        rotate: Returns x with its pairs turned, of x, cosines and sines.
        split_and_rotate: Returns queries, keys and values of rows that have them, the first two
            turned, of the rows, cosines, sines, the number of keys and the width of a head.
    """

    takes: Callable[[DTypeLike], bool]
    gate: Callable[[jax.Array, str], jax.Array]
    rms_norm: Callable[[jax.Array, jax.Array, float, float], jax.Array]
    add_and_norm: Callable[
        [jax.Array, jax.Array, jax.Array, float, float], tuple[jax.Array, jax.Array]
    ]
    rotate: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    split_and_rotate: Callable[
        [jax.Array, jax.Array, jax.Array, int, int], tuple[jax.Array, jax.Array, jax.Array]
    ]


class LayerKernels(NamedTuple):
    """Holds the kernels of layers, which `jaxpage/device/` binds: most multiply by weights.

    Attributes:
        multiply: Returns `x @ weight.T` in the type that is given.
        numbers: Returns the weight in float32 [O, I].
        multiply_packed: Returns `x @ weight.T` in the type that is given. With a number of rows of
            each group, it multiplies rows that are sorted by group by the weights of their groups.
        packed_rows: Returns rows of a weight in panels.
        by_group: Returns `pallas_kernels.grouped_product` of x, weight and counts, in the type that
            is given, or None for a product that it does not take. It is None where there is no such
            kernel.
        rows: The kernels for what is between products; None where XLA computes it.
    """

    multiply: Callable[[jax.Array, Grouped, DTypeLike], jax.Array]
    numbers: Callable[[Grouped], jax.Array]
    multiply_packed: Callable[
        [jax.Array, Packed | PackedCodes, DTypeLike, jax.Array | None], jax.Array
    ]
    packed_rows: Callable[[Packed | PackedCodes, jax.Array], jax.Array]
    by_group: (
        Callable[[jax.Array, jax.Array | Grouped, jax.Array, DTypeLike], jax.Array | None] | None
    )
    rows: RowKernels | None = None


class TokenAdapters(NamedTuple):
    """Holds the LoRA adapters of the tokens of a pass."""

    slot_T: Int[Array, "T"]  # 0 for none
    present: Int[Array, "L"]  # the slots that any token has, from 1; then the others
    num_present: Int[Array, ""]


def adapters_of(slot_T: Int[Array, "T"], num_slots: int) -> TokenAdapters:
    """Returns the adapters of tokens that have them in these slots, of `num_slots` in all."""
    slots = jnp.arange(1, num_slots + 1)
    is_present = (slot_T[:, None] == slots).any(axis=0)
    return TokenAdapters(slot_T, slots[jnp.argsort(~is_present, stable=True)], is_present.sum())


@dataclass(frozen=True, eq=False)
class TraceScope:
    """Holds what all layers share that are traced in one pass of a model. It belongs to that trace.

    Attributes:
        kernels: The kernels of layers; None where there are none: then no weight may be a
            `Grouped` one.
        adapters: The adapters of the tokens; None for a model without LoRA layers.
        divided_logits: True if each device keeps the logits of its part of the vocabulary, and none
            gathers them.
        routes: The list to which each layer with experts adds the experts [T, X] of the tokens;
            None if nobody asks for them.
    """

    kernels: LayerKernels | None = None
    adapters: TokenAdapters | None = None
    divided_logits: bool = False
    routes: list[Int[Array, "T X"]] | None = None

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
