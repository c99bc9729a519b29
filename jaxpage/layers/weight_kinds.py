"""Defines the kinds of weights that `matmul` multiplies by."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int, Int8, Shaped


class Scaled(NamedTuple):
    """A weight of eight bits that is multiplied by inputs of eight bits (W8A8).

    Row o of the weight is `scale_O[o] * values_OI[o]`.
    """

    values_OI: Int8[Array, "O I"]
    scale_O: Float[Array, "O"]


class Grouped(NamedTuple):
    """A weight of few bits that is multiplied by inputs as they are.

    See `pallas_kernels.QuantizedWeight`, which has the same fields.
    """

    values: Shaped[Array, "O _"]
    scale_OJ: Float[Array, "O J"]
    zero_OJ: Float[Array, "O J"] | None
    code: str
    group_size: int
    minimum_OJ: Float[Array, "O J"] | None = None
    scale_row_O: Int[Array, "O"] | None = None


class Packed(NamedTuple):
    """A weight in panels of outputs, as the kernel for CPUs multiplies by it.

    See `pallas_kernels.cpu.packed`. The weights of experts have one more axis in front.

    Attributes:
        panels: The panels; of int8 for inputs of eight bits (W8A8).
        num_out: The number of outputs.
        num_in: The number of inputs.
        scale_O: The scale of each output, of int8; else None.
    """

    panels: Shaped[Array, "... P K 16 _"]
    num_out: int
    num_in: int
    scale_O: Float[Array, "... O"] | None = None


class PackedCodes(NamedTuple):
    """A weight of few bits whose arrays are in panels, multiplied by inputs as they are.

    Scales, zeros and minima are not in panels where outputs share them (`scale_row_O`).
    """

    codes: Grouped
    num_out: int
    num_in: int


StoredWeight = jax.Array | Scaled | Grouped | Packed | PackedCodes
