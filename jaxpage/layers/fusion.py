"""Joins operations of a layer in one call of a kernel, each of what the one before it made.

An operation is traced alone, and noted in `producers`. Where one that follows it is computed in one
call with it, nothing else reads its result, and the compiler leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeGuard

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpage.layers.producers import MadeByMatmul, MadeByNorm
from jaxpage.layers.trace_scope import row_kernels, trace_scope
from jaxpage.layers.weight_kinds import Packed, PackedCodes, StoredWeight


class Multiply(NamedTuple):
    """The product with a weight."""

    weight: Packed | PackedCodes


class Norm(NamedTuple):
    """An RMS norm with this scale."""

    scale_D: Float[Array, "D"]


class AddAndNorm(NamedTuple):
    """The sum with other rows, and its norm."""

    added_TD: Float[Array, "T D"]
    scale_D: Float[Array, "D"]


class Gate(NamedTuple):
    """An activation, by its name in kernels, of gates times ups."""

    activation: str


class AddSum(NamedTuple):
    """The sum with the sum of the last `AddAndNorm`."""


Stage = Multiply | Norm | AddAndNorm | Gate | AddSum


RunFusion = Callable[[jax.Array, Sequence[Stage], float, float], Sequence[jax.Array]]


def fusion_kernel(dtype: DTypeLike) -> RunFusion | None:
    """Returns the kernel for fusions of rows of this type; None where there is none."""
    kernels = trace_scope().kernels
    return None if kernels is None or row_kernels(dtype) is None else kernels.run_fusion


def takes(weight: StoredWeight, dtype: DTypeLike) -> TypeGuard[Packed | PackedCodes]:
    """Returns whether a stage may multiply rows of this type by a weight."""
    if isinstance(weight, Packed):
        return weight.scale_O is not None or weight.panels.dtype == dtype
    return isinstance(weight, PackedCodes) and weight.codes.scale_row_O is None


def multiply_after_norm(
    x_TI: Float[Array, "T I"], weight: Packed | PackedCodes
) -> Float[Array, "T O"] | None:
    """Returns the product in one call with the norm that made x; None where none did."""
    run_fusion = fusion_kernel(x_TI.dtype)
    norm = trace_scope().producers.find(x_TI, MadeByNorm)
    if run_fusion is None or norm is None or not takes(weight, x_TI.dtype):
        return None
    stages: list[Stage] = [Norm(norm.scale_D), Multiply(weight)]
    return run_fusion(norm.x_TD, stages, norm.epsilon, norm.offset)[-1]


def note_matmul(y_TO: jax.Array, x_TI: jax.Array, weight: Packed | PackedCodes) -> jax.Array:
    """Returns a product, which a kernel after it may compute in its own call."""
    if y_TO.dtype == x_TI.dtype and takes(weight, x_TI.dtype):
        # Where types differ the product was rounded in between, which a stage would not do.
        trace_scope().producers.note(y_TO, MadeByMatmul(x_TI, weight))
    return y_TO
