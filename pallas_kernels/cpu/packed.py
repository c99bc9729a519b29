"""Multiplies any number of rows of x by a weight in panels (`x @ w.T`), in C++.

A panel has 16 outputs next to each other, one word of inputs after the other. A word has 32 bits:
one number of float32, two of bfloat16, or four of int8. So a product reads a weight once, from its
beginning to its end, and one vector has a word of each of 16 outputs:

    panel p     word 0: outputs 16 p, 16 p + 1, ..., 16 p + 15    word 1: the same outputs    ...

Inputs are added in their order, each output's in one sum, whatever the number of rows. So a row has
the same bits among any others. Places that fill no word or no panel are zero.

By a weight of int8, rows are multiplied that are rounded to eight bits, each with its own scale.

The codes of a quantised weight are in panels with words of one byte, and so are its scales, zeros
and minima, unless outputs share them. Codes are made float32 or bfloat16 some at a time, in the
first cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu import large_pages, library
from pallas_kernels.cpu.rows import ACTIVATIONS
from pallas_kernels.quantized_weight import CODES, QuantizedWeight

OUTPUTS_OF_PANEL = 16
# The numbers of a word.
NUMBERS = {"float32": 1, "bfloat16": 2, "int8": 4}


def pack(weight: np.ndarray, numbers: int) -> np.ndarray:
    """Returns a weight [..., O, I] of the host in panels [..., P, K, 16, numbers].

    Args:
        weight: The weight, or the codes, scales, zeros or minima of a quantised one.
        numbers: The numbers of a word; see `NUMBERS`. It is 1 for the arrays of a quantised weight.
    """
    *groups, num_out, num_in = weight.shape
    lacking = [(0, 0)] * len(groups) + [(0, -num_out % OUTPUTS_OF_PANEL), (0, -num_in % numbers)]
    if any(size for _, size in lacking):
        weight = np.pad(weight, lacking)
    # Words are moved whole: numpy takes much longer for pairs of numbers.
    words = np.ascontiguousarray(weight).view(f"u{weight.itemsize * numbers}")
    by_panel = words.reshape(*groups, -1, OUTPUTS_OF_PANEL, words.shape[-1]).swapaxes(-1, -2)
    packed = large_pages.make_array(by_panel.shape, by_panel.dtype)
    packed[...] = by_panel
    return packed.view(weight.dtype).reshape(*packed.shape, numbers)


def panels_of(weight: Float[Array, "... O I"], numbers: int) -> Float[Array, "... P K 16 _"]:
    """Returns what `pack` returns, of a weight on the device; it may be traced."""
    *groups, num_out, num_in = weight.shape
    lacking = [(0, 0)] * len(groups) + [(0, -num_out % OUTPUTS_OF_PANEL), (0, -num_in % numbers)]
    words = jnp.pad(weight, lacking).reshape(
        *groups, -1, OUTPUTS_OF_PANEL, -(-num_in // numbers), numbers
    )
    return words.swapaxes(-3, -2)


def unpack(panels: Any, num_out: int, num_in: int) -> Any:
    """Returns a weight [..., O, I] of its panels, which are an array of JAX or numpy."""
    *groups, num_panels, words, outputs, numbers = panels.shape
    by_output = panels.swapaxes(-3, -2).reshape(*groups, num_panels * outputs, words * numbers)
    return by_output[..., :num_out, :num_in]


def rows_of_panels(
    panels: Float[Array, "P K 16 _"], ids_T: Int[Array, "T"], num_in: int
) -> Float[Array, "T I"]:
    """Returns rows of a weight in panels."""
    words = panels[ids_T // OUTPUTS_OF_PANEL, :, ids_T % OUTPUTS_OF_PANEL]
    return words.reshape(len(ids_T), -1)[:, :num_in]


def pack_quantized(weight: QuantizedWeight) -> QuantizedWeight:
    """Returns a quantised weight whose arrays are in panels."""

    def in_panels(array: jax.Array) -> jax.Array:
        return jnp.asarray(pack(np.asarray(array), 1))

    packed = weight._replace(values=in_panels(weight.values))
    return packed if weight.scale_row_O is not None else _each_of_groups(packed, in_panels)


def read_quantized_rows(weight: QuantizedWeight, ids_T: Int[Array, "T"]) -> QuantizedWeight:
    """Returns rows of a quantised weight in panels, as a weight of their own, not in panels."""

    def rows(array: jax.Array) -> jax.Array:
        return rows_of_panels(array, ids_T, array.shape[1])

    return _each_of_groups(weight._replace(values=rows(_bits(weight.values))), rows)


def _each_of_groups(
    weight: QuantizedWeight, change: Callable[[jax.Array], jax.Array]
) -> QuantizedWeight:
    """Returns a weight with other scales, zeros and minima."""
    zero, minimum = (
        None if each is None else change(each) for each in (weight.zero_OJ, weight.minimum_OJ)
    )
    return weight._replace(scale_OJ=change(weight.scale_OJ), zero_OJ=zero, minimum_OJ=minimum)


def _bits(codes: jax.Array) -> jax.Array:
    """Returns codes of float8 as their bits: XLA on CPU is slow with the type."""
    is_float = jnp.issubdtype(codes.dtype, jnp.floating)
    return jax.lax.bitcast_convert_type(codes, jnp.uint8) if is_float else codes


def takes(dtype: DTypeLike) -> bool:
    """Returns whether there is a kernel for weights of this type on this machine."""
    return not library.load().reason and jnp.dtype(dtype).name in NUMBERS


class Operand(NamedTuple):
    """A weight in panels as the kernels take it.

    Attributes:
        arrays: The panels, scales, zeros and minima; those that are not there have no elements.
        code: The place of the code in `CODES`; -1 for a weight of numbers or of int8.
        group_size: The number of inputs that share a scale, of codes.
        instructions: See `Library.instructions`.
    """

    arrays: tuple[Array, Array, Array, Array]
    code: int
    group_size: int
    instructions: int


def operand_of_panels(
    panels: Float[Array, "... P K 16 _"],
    scale_O: Float[Array, "... O"] | None,
    instructions: int | None = None,
    *,
    has_groups: bool = False,
) -> Operand:
    """Returns a weight of numbers, or of int8 with scales; see `multiply_packed`."""
    if instructions is None:
        instructions = library.load().instructions.get(panels.dtype.name, library.NONE)
    # A call has all its operands; one that is not there has no elements.
    nothing = jnp.zeros(0, jnp.float32)
    scales = nothing if scale_O is None else scale_O
    arrays = (panels if has_groups else panels[None], scales, nothing, nothing)
    return Operand(arrays, -1, 0, instructions)


def operand_of_codes(
    weight: QuantizedWeight,
    num_in: int,
    dtype: DTypeLike,
    instructions: int | None = None,
    *,
    has_groups: bool = False,
) -> Operand:
    """Returns a quantised weight for inputs of this number and type; see `multiply_quantized`."""
    # The instructions multiply pairs of bfloat16, and a pair must not lie in two groups.
    if dtype != jnp.bfloat16 or num_in % 2 or weight.group_size % 2:
        instructions = library.NONE
    elif instructions is None:
        instructions = library.load().instructions.get("bfloat16", library.NONE)
    shared = weight.scale_row_O is not None
    scale_dtype = jnp.dtype(jnp.float32) if shared else weight.scale_OJ.dtype

    def of_groups(values: jax.Array | None, dtype: DTypeLike) -> jax.Array:
        if values is None:
            return jnp.zeros(0, dtype)
        values = values.astype(dtype)
        return values if has_groups else values[None]

    arrays = (
        of_groups(weight.values, weight.values.dtype),
        of_groups(weight.scale_OJ, scale_dtype),
        of_groups(weight.zero_OJ, jnp.float32),
        of_groups(weight.minimum_OJ, scale_dtype),
    )
    return Operand(arrays, CODES.index(weight.code), weight.group_size, instructions)


def count_of(num_rows: Int[Array, ""] | None) -> Int[Array, "_"]:
    """Returns a number of rows as a call takes it: without an element it is that of all rows."""
    return jnp.zeros(0, jnp.int32) if num_rows is None else num_rows[None].astype(jnp.int32)


def multiply_packed(
    x_TI: Float[Array, "T I"],
    panels: Float[Array, "... P K 16 _"],
    num_out: int,
    *,
    result: DTypeLike,
    scale_O: Float[Array, "... O"] | None = None,
    count_E: Int[Array, "E"] | None = None,
    num_rows: Int[Array, ""] | None = None,
    bias_O: Float[Array, "O"] | None = None,
    activation: str | None = None,
    instructions: int | None = None,
) -> Float[Array, "T O"]:
    """Multiplies rows by a weight in panels; sums of floats are made in float32.

    The result is `activation(x @ w.T + bias)`, which is rounded once.

    Args:
        x_TI: The rows, in the weight's type; in float32 or bfloat16 for a weight of int8.
        panels: The weight; with `count_E` the weights of all groups, one after the other.
        num_out: The number of outputs.
        scale_O: The scale of each output of a weight of int8, of all groups; else None.
        result: The type of the result, float32 or bfloat16.
        count_E: The number of rows of each group, where rows are sorted by group. Rows after those
            of the last group get zeros. None if there is one weight for all rows.
        num_rows: Without groups: the number of rows, after which there is padding, which gets
            zeros; None if there is none.
        bias_O: The bias, for one group; None for none.
        activation: The function that follows, one of `rows.ACTIVATIONS`.
        instructions: See `Library.instructions`; None for the best that the processor has.
    """
    weight = operand_of_panels(panels, scale_O, instructions, has_groups=count_E is not None)
    shape = jax.ShapeDtypeStruct((x_TI.shape[0], num_out), result)
    # The kernel has no axis of a batch: `vmap` calls it for each element.
    call = jax.ffi.ffi_call("jaxpage_multiply_packed", shape, vmap_method="sequential")
    y_TO: jax.Array = call(
        x_TI if scale_O is None else _float32_or_bfloat16(x_TI),
        *weight.arrays[:2],
        jnp.zeros(0, jnp.float32) if bias_O is None else bias_O.astype(jnp.float32),
        count_of(num_rows) if count_E is None else count_E.astype(jnp.int32),
        instructions=np.int64(weight.instructions),
        activation=np.int64(ACTIVATIONS.index(activation)),
    )
    return y_TO


def multiply_quantized(
    x_TI: Float[Array, "T I"],
    weight: QuantizedWeight,
    num_out: int,
    *,
    result: DTypeLike,
    count_E: Int[Array, "E"] | None = None,
    num_rows: Int[Array, ""] | None = None,
    instructions: int | None = None,
) -> Float[Array, "T O"]:
    """Multiplies rows by a quantised weight in panels; see `multiply_packed`.

    Rows are multiplied by the codes, and the sum of each group by its scale. Rows of bfloat16 stay
    as they are where the processor has instructions for them; else they are rounded to 16 bits,
    or made float32 (docs/internals/kernels.md).
    """
    codes = operand_of_codes(
        weight, x_TI.shape[1], x_TI.dtype, instructions, has_groups=count_E is not None
    )
    rows = weight.scale_row_O
    shape = jax.ShapeDtypeStruct((x_TI.shape[0], num_out), result)
    call = jax.ffi.ffi_call("jaxpage_multiply_coded", shape, vmap_method="sequential")
    y_TO: jax.Array = call(
        _float32_or_bfloat16(x_TI),
        *codes.arrays,
        jnp.zeros(0, jnp.int32) if rows is None else rows.astype(jnp.int32),
        count_of(num_rows) if count_E is None else count_E.astype(jnp.int32),
        code=np.int64(codes.code),
        group_size=np.int64(codes.group_size),
        instructions=np.int64(codes.instructions),
    )
    return y_TO


def _float32_or_bfloat16(x_TI: jax.Array) -> jax.Array:
    return x_TI if x_TI.dtype == jnp.bfloat16 else x_TI.astype(jnp.float32)
