"""Remembers by which operation an array of a trace was made.

Layers give each other arrays alone. Where a kernel computes an operation in one call with the one
before it, the layer that calls the kernel finds here what the first one was, and gives its inputs.
The compiler leaves the first one out where nothing else reads its result.

    made by           noted by                  found by
    MadeBySum         norms.add_before_norm     norms.keep_and_norm, for a norm of the sum
    MadeByNorm        norms.keep_and_norm       fusion.multiply_after_norm, for its product
    MadeByMatmul      fusion.note_matmul        feeding.add_and_feed, for the half after attention
    MadeBySegments    device.batch_invariance   its norms, and rotations in device.attention
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
from jaxtyping import Array, Float

from jaxpage.layers.weight_kinds import Packed, PackedCodes


class MadeBySum(NamedTuple):
    """Is the sum of two arrays."""

    x_TD: Float[Array, "T D"]
    added_TD: Float[Array, "T D"]


class MadeByNorm(NamedTuple):
    """Is an RMS norm of an array."""

    x_TD: Float[Array, "T D"]
    scale_D: Float[Array, "D"]
    epsilon: float
    offset: float


class MadeByMatmul(NamedTuple):
    """Is the product of an array with a weight in panels."""

    x_TI: Float[Array, "T I"]
    weight: Packed | PackedCodes


class MadeBySegments(NamedTuple):
    """Is the rounded sum of the sums of segments of a product."""

    sums_ZTO: Float[Array, "Z T O"]


_Producer = TypeVar("_Producer", MadeBySum, MadeByNorm, MadeByMatmul, MadeBySegments)


class Producers:
    """Remembers the operations that made the arrays of one trace; see the module."""

    def __init__(self) -> None:
        # Each array is held, so that no other one gets its id.
        self._noted: dict[tuple[int, type], tuple[jax.Array, tuple[object, ...]]] = {}

    def note(self, array: jax.Array, producer: _Producer) -> None:
        """Remembers what made an array."""
        self._noted[id(array), type(producer)] = array, producer

    def find(self, array: jax.Array, kind: type[_Producer]) -> _Producer | None:
        """Returns what made an array, if that was noted and is of this kind; else None."""
        noted = self._noted.get((id(array), kind))
        return noted[1] if noted is not None and isinstance(noted[1], kind) else None
