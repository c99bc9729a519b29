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
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
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
from pallas_kernels.xla.product import has_scales_of_outputs, multiply_on_gpu

PACKED = ("int4", "fp4")  # two codes in a byte
ROOMY = ((9, 0), (10, 0))  # compute capabilities whose programs may have 227 KiB of shared memory
FLOAT8_CAPABILITY = (8, 9)  # below it Triton converts nothing from float8_e4m3fn
PROGRAMS = 512  # these keep all of a GPU's processors reading: 132 of an H100, four each
LEAST_TURNS = 4
MOST_SPLITS = 8
# With more rows a temporary array of the weight costs less than decoding it for each tile of rows.
# This is an estimate, which was not measured.
MOST_ROWS = 512


@dataclass(frozen=True)
class Cut:
    """Says how a product is cut.

    Attributes:
        rows: The rows of a tile.
        cols: The outputs of a program.
        depth: The inputs of a turn.
        num_warps: The warps of a program.
        num_stages: The turns whose loads are in flight.
        splits: The programs that share the turns of a tile.
    """

    rows: int
    cols: int
    depth: int
    num_warps: int
    num_stages: int
    splits: int = 1


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
            found_OJ = tb.load(
                ref.at[group, scale_row_O[:, None], at_J[None, :]], mask=mask, other=0
            ).astype(jnp.float32)
            if num_groups == 1:
                return found_OJ
            repeated = jnp.broadcast_to(
                found_OJ[:, :, None], (cut.cols, num_groups, width // num_groups)
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
        share = pl.cdiv(turns, cut.splits)
        end = share if cut.splits == 1 else jnp.minimum((split + 1) * share, turns)
        sum_RO = lax.fori_loop(split * share, end, one_turn, empty)
        if scale_ref is not None and config.scale_group is None:
            scale_O = tb.load(scale_ref.at[group, scale_row_O, 0], mask=has_O, other=0)
            sum_RO *= scale_O.astype(jnp.float32)[None, :]
        mask_RO = has_R[:, None] & has_O[None, :]
        out = out_ref.at[split, (first + row_R)[:, None], at_O[None, :]]
        tb.store(out, sum_RO.astype(out_ref.dtype), mask=mask_RO)


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


def heuristic(
    x_shape: tuple[int, int], w_shape: tuple[int, int], dtype: str, code: str | None, *, roomy: bool
) -> Cut:
    """Returns the cut of a product for a GPU on which nothing was measured.

    It depends on shapes alone, so that the order of a row's sums does too.

    Args:
        x_shape: The rows and inputs.
        w_shape: The groups and outputs.
        dtype: The type of x.
        code: The code of the weights, or None.
        roomy: Says whether a program has 227 KiB of shared memory.
    """
    num_rows, num_in = x_shape
    num_groups, num_out = w_shape
    average = num_rows / num_groups
    rows = (
        16 if average <= 16 else 32 if average <= 32 else 64 if average <= 128 or not roomy else 128
    )
    warps = 8 if rows == 128 else 4
    stages = 4 if roomy else 3
    if dtype == "float32":  # without tensor cores, operands of products are in registers
        cut = Cut(min(rows, 32), 64, 32, 4, 2)
    elif code is None:
        cut = Cut(rows, 128, 128 if dtype == "int8" else 64, warps, stages)
    else:
        cut = Cut(rows, 64, 256 if code in PACKED and rows == 16 else 128, warps, stages)
    programs = _num_tiles(num_rows, num_groups, cut.rows) * pl.cdiv(num_out, cut.cols)
    splits = min(PROGRAMS // programs, num_in // (LEAST_TURNS * cut.depth), MOST_SPLITS)
    return replace(cut, splits=max(1, splits))


def _num_tiles(num_rows: int, num_groups: int, rows: int) -> int:
    """Returns the largest possible number of tiles."""
    return num_rows // rows + min(num_groups, num_rows)


def multiply_grouped(
    x_PI: jax.Array,
    weight: jax.Array | QuantizedWeight,
    count_E: jax.Array | None,
    result: DTypeLike,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies as `pallas_kernels.grouped_product` says; rows of no group are not written.

    Args:
        x_PI: The rows, sorted by group.
        weight: The weights of the groups.
        count_E: The rows of each group; None if one group has all rows.
        result: The type of the product.
        interpret: Runs the kernel on CPU.

    Raises:
        NotImplementedError: Scales belong to groups of inputs that do not fit a turn.
    """
    quantized = weight if isinstance(weight, QuantizedWeight) else None
    values = weight.values if isinstance(weight, QuantizedWeight) else weight
    code = None if quantized is None else quantized.code
    num_groups, num_out = values.shape[:2]
    has = capability(target_device())
    shapes = (x_PI.shape[0], x_PI.shape[1]), (num_groups, num_out)
    cut = heuristic(*shapes, x_PI.dtype.name, code, roomy=has is None or has in ROOMY)
    config = Config(
        cut=cut,
        code=code,
        scale_group=None if quantized is None else _scale_group(quantized, cut),
        num_in=x_PI.shape[1],
        num_out=num_out,
        result=jnp.dtype(result).name,
        converts=(has or FLOAT8_CAPABILITY) >= FLOAT8_CAPABILITY,
        interpret=interpret,
    )
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
    return _multiply([count_E, x_PI, values, *of_groups], config)


def _scale_group(weight: QuantizedWeight, cut: Cut) -> int | None:
    size = weight.group_size
    num_in = weight.num_in
    if weight.scale_OJ.shape[-1] == 1:
        return None if weight.zero_OJ is None and weight.minimum_OJ is None else num_in
    if size % cut.depth and (cut.depth % size or size == 1):
        raise NotImplementedError(
            f"a scale for each {size} inputs (powers of two from 2 on, and multiples of "
            f"{cut.depth}, only)"
        )
    return size


# It is traced and lowered once for all layers of a model.
@functools.partial(jax.jit, static_argnames="config")
def _multiply(operands: list[Any], config: Config) -> jax.Array:
    count_E, x_PI, values, *of_groups = operands
    cut = config.cut
    num_rows = x_PI.shape[0]
    num_groups = values.shape[0]
    num_tiles = _num_tiles(num_rows, num_groups, cut.rows)
    blocks = pl.cdiv(config.num_out, cut.cols)
    apart = cut.splits > 1
    sums_dtype = jnp.int32 if jnp.issubdtype(x_PI.dtype, jnp.integer) else jnp.float32
    call = tb.kernel_call(
        functools.partial(kernel, config=config),
        name="grouped_product",
        grid=(*((num_tiles, blocks) if num_groups == 1 else (blocks, num_tiles)), cut.splits),
        out_shape=jax.ShapeDtypeStruct(
            (cut.splits, num_rows, config.num_out),
            sums_dtype if apart else jnp.dtype(config.result),
        ),
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        interpret=config.interpret,
    )
    if config.code in PACKED:
        x_PI = x_PI.reshape(num_rows, -1, 2).swapaxes(1, 2)
    out_ZPO: jax.Array = call(count_E, x_PI, values, *of_groups)
    return functools.reduce(operator.add, list(out_ZPO)).astype(config.result)


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
    """Multiplies as `pallas_kernels.quantized_product` says."""
    if x_TI.shape[0] <= MOST_ROWS and not has_scales_of_outputs(weight):
        try:
            return multiply_grouped(x_TI, stack(weight), None, result, interpret=interpret)
        except NotImplementedError:
            pass  # the kernel does not take groups of inputs of this size
    return multiply_on_gpu(x_TI, weight, result)
