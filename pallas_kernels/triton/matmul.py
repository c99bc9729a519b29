"""Computes grouped products with a Triton kernel.

It multiplies rows that are sorted by group by the weights of their groups, in one launch. A group
is an expert of a mixture; a product with one weight has one group. A program takes a tile of rows
of one group and a block of outputs, and walks through the inputs in turns of `Cut.depth`. It reads
weights from where they are stored, in 16-byte asynchronous copies:

    rows by group   [ 0 0 0 | 2 2 2 2 2 | 3 ]                group 1 has no rows
    tiles of four   [ 0 0 0 . ] [ 2 2 2 2 ] [ 2 . . . ] [ 3 . . . ] [ . . . . ]
                                                             the last one returns at once

Codes become numbers of x's type in registers, each with the scale of its group of inputs. If an
output has one scale, the sum is multiplied by it. Products of 8-bit integers are summed as
integers. If there are few tiles, several programs (splits) share the turns of a tile, and their
sums are added up.

`multiply_by_segments` is the same kernel with another cut (`cut_by_weight`): the inputs are in
segments of fixed length, whose sums are added up in order, by the program that goes through them
or, after split programs, by a second kernel.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.compat import target_device
from pallas_kernels.kernel_set import capability
from pallas_kernels.quantized_weight import QuantizedWeight
from pallas_kernels.triton import backend as tb
from pallas_kernels.triton.matmul_tiles import (
    PACKED,
    ROOMY,
    Cut,
    cut_by_weight,
    heuristic,
    num_tiles,
)
from pallas_kernels.xla.matmul import has_scales_of_outputs, multiply_on_gpu

FLOAT8_CAPABILITY = (8, 9)  # below it Triton converts nothing from float8_e4m3fn
# With more rows a temporary array of the weight costs less than decoding it for each tile of rows.
# This is an estimate, which was not measured.
MAX_ROWS = 512


@dataclass(frozen=True)
class Config:
    """Holds all constants that a kernel is compiled for.

    Attributes:
        cut: The way the product is cut.
        code: The code of the weights; None if they are numbers of x's type.
        scale_group: The inputs that share a scale; None if the sum is multiplied by the scale.
        num_in: The inputs.
        num_out: The outputs.
        result: The type of the product.
        converts: Says whether this GPU turns float8 into other types.
        interpret: Says whether the kernel runs on CPU.
    """

    cut: Cut
    code: str | None
    scale_group: int | None
    num_in: int
    num_out: int
    result: str
    converts: bool
    interpret: bool


def kernel(  # type: ignore[no-untyped-def]
    count_ref,
    x_ref,
    values_ref,
    scale_ref,
    zero_ref,
    minimum_ref,
    scale_row_ref,
    out_ref,
    *,
    config: Config,
) -> None:
    """Multiplies one tile by one block of outputs.

    x_ref is [P, I]; for two codes in a byte [P, 2, I / 2], first the inputs of the low halves.
    out_ref is [splits, P, O].
    """
    cut = config.cut
    # Programs that start one after another share weights or rows: with one group they are the tiles
    # of a block, with many groups the blocks of a tile.
    tile, block = (pl.program_id(axis) for axis in ((0, 1) if values_ref.shape[0] == 1 else (1, 0)))
    split = pl.program_id(2)
    group, first, count = _place(count_ref, tile, cut.rows, x_ref.shape[0])

    @pl.when(count > 0)
    def _() -> None:
        row_R = jnp.arange(cut.rows)
        at_O = block * cut.cols + jnp.arange(cut.cols)
        has_R = row_R < count
        has_O = at_O < config.num_out
        scale_row_O = (
            at_O if scale_row_ref is None else tb.load(scale_row_ref.at[at_O], mask=has_O, other=0)
        )
        packed = config.code in PACKED
        width = cut.depth // 2 if packed else cut.depth  # the columns of `values` in a turn
        num_columns = config.num_in // 2 if packed else config.num_in

        def of_groups(ref: Any, turn: Any) -> Any:
            """Returns the turn's scales, zeros or minima, repeated in the shape of its codes."""
            size = config.scale_group or config.num_in
            num_groups = 1 if ref.shape[2] == 1 else max(1, cut.depth // size)
            at_J = turn * cut.depth // size + jnp.arange(num_groups)
            mask = has_O[:, None] & (at_J < ref.shape[2])[None, :]
            value_OJ = tb.load(
                ref.at[group, scale_row_O[:, None], at_J[None, :]], mask=mask, other=0
            ).astype(jnp.float32)
            if num_groups == 1:
                return value_OJ
            repeated = jnp.broadcast_to(
                value_OJ[:, :, None], (cut.cols, num_groups, width // num_groups)
            )
            return repeated.reshape(cut.cols, width)

        def numbers(codes_OI: Any, high: bool, turn: Any) -> Any:
            """Returns the weights of a turn in x's type."""
            if config.code is None or (config.scale_group is None and config.code == "int8"):
                return codes_OI.astype(x_ref.dtype)
            plain = _decode(codes_OI, config, high)
            if zero_ref is not None:
                plain = plain - of_groups(zero_ref, turn)
            elif config.code == "int4" and minimum_ref is None:
                # See `quantized_weight`: the codes 0 to 15 mean -8 to 7 then.
                plain = plain - 8.0
            if config.scale_group is not None:
                plain = plain * of_groups(scale_ref, turn)
            if minimum_ref is not None:
                plain = plain + of_groups(minimum_ref, turn)
            return plain.astype(x_ref.dtype)

        def one_turn(turn: Any, sum_RO: Any) -> Any:
            at_I = turn * width + jnp.arange(width)
            has_I = at_I < num_columns
            mask_OI = has_O[:, None]
            mask_RI = has_R[:, None]
            if num_columns % width:
                mask_OI = mask_OI & has_I[None, :]
                mask_RI = mask_RI & has_I[None, :]
            codes_OI = tb.load(
                values_ref.at[group, at_O[:, None], at_I[None, :]], mask=mask_OI, other=0
            )
            for half in range(2 if packed else 1):
                at = ((first + row_R)[:, None], *((half,) if packed else ()), at_I[None, :])
                x_RI = tb.load(x_ref.at[at], mask=mask_RI, other=0)
                sum_RO += tb.dot(
                    x_RI,
                    numbers(codes_OI, half == 1, turn),
                    trans_b=True,
                    precision=lax.Precision.HIGHEST,
                )
            return sum_RO

        integers = jnp.issubdtype(x_ref.dtype, jnp.integer)
        empty = jnp.zeros((cut.rows, cut.cols), jnp.int32 if integers else jnp.float32)
        turns = pl.cdiv(num_columns, width)
        share = pl.cdiv(turns, cut.segments)
        if cut.folds > 1:
            sum_RO = _fold_segments(one_turn, empty, turns, share)
        else:
            end = share if cut.splits == 1 else jnp.minimum((split + 1) * share, turns)
            sum_RO = lax.fori_loop(split * share, end, one_turn, empty)
        # Ordered splits are scaled after their sum, as one program scales its whole sum: to scale
        # each part would give other bits.
        has_whole_sum = cut.splits == 1 or not cut.is_ordered
        if scale_ref is not None and config.scale_group is None and has_whole_sum:
            scale_O = tb.load(scale_ref.at[group, scale_row_O, 0], mask=has_O, other=0)
            sum_RO *= scale_O.astype(jnp.float32)[None, :]
        mask_RO = has_R[:, None] & has_O[None, :]
        out = out_ref.at[split, (first + row_R)[:, None], at_O[None, :]]
        tb.store(out, sum_RO.astype(out_ref.dtype), mask=mask_RO)


def _fold_segments(one_turn: Any, empty: Any, turns: int, share: int) -> Any:
    """Returns the sum of all turns, in which each run of `share` turns is summed on its own.

    It is one loop, since between two loops the pipeline of loads runs dry.
    """

    def fold(state: Any) -> Any:
        sum_RO, total_RO = state
        return empty, total_RO + sum_RO

    def turn_and_fold(turn: Any, state: Any) -> Any:
        sum_RO, total_RO = state
        state = one_turn(turn, sum_RO), total_RO
        return lax.cond(lax.rem(turn + 1, share) == 0, fold, lambda state: state, state)

    sum_RO, total_RO = lax.fori_loop(0, turns, turn_and_fold, (empty, empty))
    return total_RO + sum_RO if turns % share else total_RO


def fold_kernel(  # type: ignore[no-untyped-def]
    count_ref, sums_ref, scale_ref, scale_row_ref, out_ref, *, cols: int
) -> None:
    """Adds up the sums of segments [segments, P, O] in order, and multiplies by scales [E, O, 1].

    Rows of no group have no scale, and are left out.
    """
    row = pl.program_id(0)
    group, _, count = _place(count_ref, row, 1, sums_ref.shape[1])
    at_O = pl.program_id(1) * cols + jnp.arange(cols)
    has_O = (count > 0) & (at_O < sums_ref.shape[2])

    def add(segment: Any, total_O: Any) -> Any:
        return total_O + tb.load(sums_ref.at[segment, row, at_O], mask=has_O, other=0)

    total_O = lax.fori_loop(0, sums_ref.shape[0], add, jnp.zeros(cols, sums_ref.dtype))
    if scale_ref is not None:
        row_O = (
            at_O if scale_row_ref is None else tb.load(scale_row_ref.at[at_O], mask=has_O, other=0)
        )
        scale_O = tb.load(scale_ref.at[group, row_O, 0], mask=has_O, other=0)
        total_O *= scale_O.astype(jnp.float32)
    tb.store(out_ref.at[row, at_O], total_O.astype(out_ref.dtype), mask=has_O)


def _place(count_ref: Any, tile: Any, rows: int, num_rows: int) -> tuple[Any, Any, Any]:
    """Returns the group of a tile, its first row and its number of rows.

    Each program finds its own place, which takes less time than one more launch.

    Args:
        count_ref: The rows of each group; None if one group has all rows.
        tile: The tile.
        rows: The rows of a tile at most.
        num_rows: All rows.
    """
    if count_ref is None:
        return 0, tile * rows, jnp.minimum(num_rows - tile * rows, rows)
    num_groups = count_ref.shape[0]
    at_E = jnp.arange(pl.next_power_of_2(num_groups))
    count_E = tb.load(count_ref.at[at_E], mask=at_E < num_groups, other=0)
    tiles_E = (count_E + rows - 1) // rows
    # As many groups have all their tiles before this one. For a tile after all others it is the
    # number of groups.
    group = jnp.sum((jnp.cumsum(tiles_E) <= tile).astype(jnp.int32))

    def total(values_E: Any, mask_E: Any) -> Any:
        return jnp.sum(jnp.where(mask_E, values_E, 0))

    within = (tile - total(tiles_E, at_E < group)) * rows
    # The count is zero after the last group.
    count = jnp.clip(total(count_E, at_E == group) - within, 0, rows)
    return group, total(count_E, at_E < group) + within, count


def _decode(codes: Any, config: Config, high: bool) -> jax.Array:
    """Returns codes in float32, before zeros, minima and scales.

    With `high` they are the upper halves of bytes.
    """
    if config.code == "int8":
        return codes.astype(jnp.float32)
    if config.code == "fp8":
        if config.converts:
            return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
        return _float8(codes.astype(jnp.int32))
    nibble = codes.astype(jnp.int32)
    nibble = (nibble >> 4) & 15 if high else nibble & 15
    return _float4(nibble) if config.code == "fp4" else nibble.astype(jnp.float32)


def _float8(bits: jax.Array) -> jax.Array:
    """Decodes float8_e4m3fn from its bits, for GPUs that do not convert it."""
    size = bits & 0x7F
    # Subnormal numbers have no hidden bit: it is added, and its value is subtracted again.
    is_small = size < 8
    # An exponent of float8_e4m3fn is 7 more than it means, and one of float32 127 more.
    number = lax.bitcast_convert_type(
        (jnp.where(is_small, size + 8, size) << 20) + (120 << 23), jnp.float32
    )
    number = number - jnp.where(is_small, 2.0**-6, 0.0)
    number = jnp.where(size == 0x7F, jnp.nan, number)
    return jnp.where(bits > 0x7F, -number, number)


def _float4(nibble: jax.Array) -> jax.Array:
    """Decodes float4_e2m1fn from its bits, of which 0 and 0.5 are subnormal."""
    size = nibble & 7
    bits = jnp.where(size < 2, size * (126 << 23), (size << 22) + (126 << 23))
    number = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(nibble > 7, -number, number)


def multiply_grouped(
    x_PI: jax.Array,
    weight: jax.Array | QuantizedWeight,
    count_E: jax.Array | None,
    result: DTypeLike,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies as `pallas_kernels.grouped_matmul` says; rows of no group are not written.

    Args:
        x_PI: The rows, sorted by group.
        weight: The weights of the groups.
        count_E: The rows of each group; None if one group has all rows.
        result: The type of the product.
        interpret: Runs the kernel on CPU.

    Raises:
        NotImplementedError: Scales belong to groups of inputs that do not fit a turn.
    """
    cut = heuristic(*_shapes(x_PI, weight), roomy=_is_roomy())
    operands, config = _prepare(x_PI, weight, count_E, result, cut, interpret=interpret)
    return _add_up(operands, _sum_segments(operands, config), config)


def multiply_by_segments(
    x_TI: jax.Array,
    weight: jax.Array | QuantizedWeight,
    count_E: jax.Array | None,
    result: DTypeLike,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Multiplies as `pallas_kernels.batch_invariant_matmul` says.

    Args:
        x_TI: The rows; sorted by group, if there are groups.
        weight: The weight [O, I], of numbers of x's type or of codes; those of groups [E, O, I].
        count_E: The rows of each group; None for one weight.
        result: The type of the product.
        interpret: Runs the kernel on CPU.

    Returns:
        The product, and the sums of segments [Z, T, O] of which it is the rounded sum; None in
        their place if a program adds them up, or scales follow.

    Raises:
        NotImplementedError: Scales belong to groups of inputs that do not fit a turn, or a weight
            of numbers has another type than x.
    """
    if not isinstance(weight, QuantizedWeight) and weight.dtype != x_TI.dtype:
        raise NotImplementedError(f"a product of {x_TI.dtype} with a weight of {weight.dtype}")
    if count_E is None:
        weight = stack(weight) if isinstance(weight, QuantizedWeight) else weight[None]
    cut = cut_by_weight(*_shapes(x_TI, weight), roomy=_is_roomy())
    operands, config = _prepare(x_TI, weight, count_E, result, cut, interpret=interpret)
    sums_ZTO = _sum_segments(operands, config)
    y_TO = _add_up(operands, sums_ZTO, config)
    is_folded = cut.splits > 1 and count_E is None and not isinstance(weight, QuantizedWeight)
    return y_TO, sums_ZTO if is_folded else None


def _shapes(
    x_PI: jax.Array, weight: jax.Array | QuantizedWeight
) -> tuple[tuple[int, int], tuple[int, int], str, str | None]:
    """Returns the arguments that `matmul_tiles` has of a product with weights of groups."""
    values = weight.values if isinstance(weight, QuantizedWeight) else weight
    code = weight.code if isinstance(weight, QuantizedWeight) else None
    of_x, of_weights = (x_PI.shape[0], x_PI.shape[1]), (values.shape[0], values.shape[1])
    return of_x, of_weights, x_PI.dtype.name, code


def _is_roomy() -> bool:
    has = capability(target_device())
    return has is None or has in ROOMY


def _prepare(
    x_PI: jax.Array,
    weight: jax.Array | QuantizedWeight,
    count_E: jax.Array | None,
    result: DTypeLike,
    cut: Cut,
    *,
    interpret: bool,
) -> tuple[list[Any], Config]:
    """Returns the operands of the kernel, the last four of which are scales, and its constants."""
    quantized = weight if isinstance(weight, QuantizedWeight) else None
    values = weight.values if isinstance(weight, QuantizedWeight) else weight
    has = capability(target_device())
    config = Config(
        cut=cut,
        code=None if quantized is None else quantized.code,
        scale_group=None if quantized is None else _scale_group(quantized, cut),
        num_in=x_PI.shape[1],
        num_out=values.shape[1],
        result=jnp.dtype(result).name,
        converts=(has or FLOAT8_CAPABILITY) >= FLOAT8_CAPABILITY,
        interpret=interpret,
    )
    # Every GPU can load bytes, even one without float8; `_decode` makes numbers of them.
    if values.dtype == jnp.float8_e4m3fn:
        values = lax.bitcast_convert_type(values, jnp.uint8)
    of_groups = (
        [None] * 4
        if quantized is None
        else [
            quantized.scale_OJ,
            quantized.zero_OJ,
            quantized.minimum_OJ,
            quantized.scale_row_O,
        ]
    )
    count_E = None if count_E is None else count_E.astype(jnp.int32)
    return [count_E, x_PI, values, *of_groups], config


def _scale_group(weight: QuantizedWeight, cut: Cut) -> int | None:
    size = weight.group_size
    num_in = weight.num_in
    if weight.scale_OJ.shape[-1] == 1:
        # Zeros and minima are added before the product, so the scale cannot wait until after it.
        return None if weight.zero_OJ is None and weight.minimum_OJ is None else num_in
    if size % cut.depth and (cut.depth % size or size == 1):
        raise NotImplementedError(
            f"a scale for each {size} inputs (powers of two from 2 on, and multiples of "
            f"{cut.depth}, only)"
        )
    return size


# It is traced and lowered once for all layers of a model.
@functools.partial(jax.jit, static_argnames="config")
def _sum_segments(operands: list[Any], config: Config) -> jax.Array:
    """Returns the sums of segments, or of parts that are added in any order; one if not split."""
    count_E, x_PI, values, *of_groups = operands
    cut = config.cut
    num_rows = x_PI.shape[0]
    num_groups = values.shape[0]
    tiles = num_tiles(num_rows, num_groups, cut.rows)
    blocks = pl.cdiv(config.num_out, cut.cols)
    separate = cut.splits > 1
    sums_dtype = jnp.int32 if jnp.issubdtype(x_PI.dtype, jnp.integer) else jnp.float32
    call = tb.kernel_call(
        functools.partial(kernel, config=config),
        name="grouped_matmul",
        grid=(*((tiles, blocks) if num_groups == 1 else (blocks, tiles)), cut.splits),
        out_shape=jax.ShapeDtypeStruct(
            (cut.splits, num_rows, config.num_out),
            sums_dtype if separate else jnp.dtype(config.result),
        ),
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        interpret=config.interpret,
    )
    if config.code in PACKED:
        # The two codes of a byte are of neighbouring inputs. With the even inputs first and then
        # the odd ones, a turn reads both kinds from adjacent places.
        x_PI = x_PI.reshape(num_rows, -1, 2).swapaxes(1, 2)
    out_ZPO: jax.Array = call(count_E, x_PI, values, *of_groups)
    return out_ZPO


@functools.partial(jax.jit, static_argnames="config")
def _add_up(operands: list[Any], sums_ZPO: jax.Array, config: Config) -> jax.Array:
    if config.cut.splits > 1 and config.cut.is_ordered:
        return _fold(operands, sums_ZPO, config)
    return functools.reduce(operator.add, list(sums_ZPO)).astype(config.result)


def _fold(operands: list[Any], sums_ZPO: jax.Array, config: Config) -> jax.Array:
    """Returns the sum over segments; XLA might keep more bits of it where it goes on."""
    count_E, _, _, scale_EOJ, _, _, scale_row_O = operands
    is_scaled = scale_EOJ is not None and config.scale_group is None
    num_rows, num_out = sums_ZPO.shape[1:]
    cols = min(1024, pl.next_power_of_2(num_out))
    call = tb.kernel_call(
        functools.partial(fold_kernel, cols=cols),
        name="matmul_fold",
        grid=(num_rows, pl.cdiv(num_out, cols)),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_out), jnp.dtype(config.result)),
        num_warps=4,
        num_stages=1,
        interpret=config.interpret,
    )
    scales = (scale_EOJ, scale_row_O) if is_scaled else (None, None)
    out_PO: jax.Array = call(count_E if is_scaled else None, sums_ZPO, *scales)
    return out_PO


def stack(weight: QuantizedWeight) -> QuantizedWeight:
    """Returns a weight as the weights of one group."""
    zero, minimum = (
        None if each is None else each[None] for each in (weight.zero_OJ, weight.minimum_OJ)
    )
    return weight._replace(
        values=weight.values[None], scale_OJ=weight.scale_OJ[None], zero_OJ=zero, minimum_OJ=minimum
    )


def multiply(
    x_TI: jax.Array, weight: QuantizedWeight, result: DTypeLike, *, interpret: bool = False
) -> jax.Array:
    """Multiplies as `pallas_kernels.quantized_matmul` says."""
    # With one scale for each output, XLA multiplies by the codes and makes no array of the weight.
    if x_TI.shape[0] <= MAX_ROWS and not has_scales_of_outputs(weight):
        try:
            return multiply_grouped(x_TI, stack(weight), None, result, interpret=interpret)
        except NotImplementedError:
            pass  # the kernel does not take groups of inputs of this size
    return multiply_on_gpu(x_TI, weight, result)
