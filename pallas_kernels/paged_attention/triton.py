"""Paged attention through Pallas' Triton backend: one kernel for decode, verification and prompt chunks, mixed as they come.

A program takes a tile of query tokens of one row, with all G query heads of one key/value head (they read the same keys and values),
and one split of the row's context. It walks its split in turns of `Tiles.context` positions: page ids come by position from the block
table, keys and values by page id, and an online softmax adds them up in float32. Where a context may have several splits, a second kernel
puts them together (`triton_reduce`).

Where the splits of a tile end depends on the tile alone, so the sums of a token have one order in every bucket and batch.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton_backend as tb
from pallas_kernels.paged_attention.arguments import Arguments
from pallas_kernels.paged_attention.query_tiles import QueryCut, query_cut
from pallas_kernels.paged_attention.tiles import Shape, Tiles, shape_of, tuned
from pallas_kernels.paged_attention.triton_reduce import reduce_splits

LOWEST = -1e30  # where a running maximum starts; finite, so that a masked score, minus infinity, is always below it
QUERY_DTYPES = ("bfloat16", "float16", "float32")
PAGE_DTYPES = (*QUERY_DTYPES, "int8", "float8_e4m3fn", "uint8")
MAX_WIDTH = 256
LOG2_E = math.log2(math.e)


def attend(arguments: Arguments, tiles: Tiles | None, *, interpret: bool) -> jax.Array:
    """Returns out_TNH in the queries' type."""
    _refuse(arguments)
    shape = shape_of(arguments)
    tiles = tiles or tuned("triton", shape) or heuristic(shape)
    if tiles.query_rows < shape.group:
        raise NotImplementedError(
            f"tiles.query_rows of {tiles.query_rows}: the {shape.group} query heads of a key/value head share a tile"
        )
    config = _Config(
        tiles=tiles,
        group=shape.group,
        query_tokens=min(tiles.query_tokens(shape.group), arguments.max_query_len),
        scale=arguments.scale,
        sliding_window=arguments.sliding_window,
        logit_softcap=arguments.logit_softcap,
        max_query_len=arguments.max_query_len,
        interpret=interpret,
    )
    arrays = {name: getattr(arguments, name) for name in _ARRAYS}
    return _attend(arrays, config)


def heuristic(shape: Shape) -> Tiles:
    """Tiles for a GPU on which nobody has measured."""
    lanes = max(16, pl.next_power_of_2(shape.group))
    wide, slow = shape.head_width > 128, shape.dtype == "float32"  # slow: no tensor cores, so registers go to the sums
    context = 32 if wide or slow else 64
    if shape.kind == "decode":
        rows, warps, splits = lanes, 4, 16
    elif shape.kind == "verify":
        rows, warps, splits = max(lanes, 32 if slow else 64), 4, 8
    else:
        rows, warps, splits = max(lanes, 32 if slow else 128), 8, 1
    if shape.kind == "verify" and wide:
        warps = 8
    return Tiles(
        query_rows=rows,
        context=context,
        max_splits=splits,
        split_context=256,
        num_warps=warps,
        num_stages=2 if wide and rows >= 64 else 3,
    )


_ARRAYS = (
    *("q_TNH", "k_pages", "v_pages", "block_table_BM", "context_len_B", "query_start"),
    *("tree_mask_TQ", "k_scale", "v_scale"),
)


@dataclass(frozen=True)
class _Config:
    """What a kernel is compiled for, apart from shapes."""

    tiles: Tiles
    group: int
    query_tokens: int  # of a tile, at most
    scale: float
    sliding_window: int | None
    logit_softcap: float | None
    max_query_len: int
    interpret: bool


def _refuse(arguments: Arguments) -> None:
    block_size, _, width = arguments.k_pages.shape[1:]
    if arguments.tree_mask_TQ is not None and arguments.sliding_window is not None:
        raise NotImplementedError("tree_mask_TQ with sliding_window")
    if arguments.q_TNH.dtype.name not in QUERY_DTYPES:
        raise NotImplementedError(f"q_TNH of {arguments.q_TNH.dtype} (only {', '.join(QUERY_DTYPES)})")
    if arguments.k_pages.dtype.name not in PAGE_DTYPES:
        raise NotImplementedError(f"k_pages of {arguments.k_pages.dtype} (only {', '.join(PAGE_DTYPES)})")
    if width > MAX_WIDTH:
        raise NotImplementedError(f"k_pages with heads {width} wide (up to {MAX_WIDTH} only)")
    if block_size & (block_size - 1):
        raise NotImplementedError(f"k_pages with blocks of {block_size} slots (powers of two only)")
    # Pallas addresses arrays of up to 2^32 bytes with 32 bits and a sign, so the upper half of one-byte elements is out of reach.
    if arguments.k_pages.dtype.itemsize == 1 and 2**31 <= arguments.k_pages.size <= 2**32:
        raise NotImplementedError(f"k_pages of {arguments.k_pages.size} one-byte elements (fewer than 2^31 only)")


@functools.partial(jax.jit, static_argnames="config")  # traced and lowered once for all layers of a model
def _attend(arrays: dict[str, jax.Array | None], config: _Config) -> jax.Array:
    arguments = Arguments(
        **arrays,  # type: ignore[arg-type]
        scale=config.scale,
        sliding_window=config.sliding_window,
        logit_softcap=config.logit_softcap,
        max_query_len=config.max_query_len,
    )
    tiles, q_TNH = config.tiles, arguments.q_TNH
    cut = query_cut(arguments, config.query_tokens)
    schedule_RF, splits_T = _schedule(arguments, cut, tiles)
    apart = tiles.max_splits > 1
    many = (tiles.max_splits, *q_TNH.shape)
    out = [jax.ShapeDtypeStruct(many, jnp.float32), jax.ShapeDtypeStruct(many[:3], jnp.float32)]
    if not apart:
        out = [jax.ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype)]
    call = tb.kernel_call(
        functools.partial(_kernel, config=config),
        name="paged_attention",
        grid=(schedule_RF.shape[0], arguments.k_pages.shape[2], tiles.max_splits),
        out_shape=out,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=config.interpret,
    )
    result = call(
        schedule_RF,
        q_TNH,
        arguments.k_pages,
        arguments.v_pages,
        arguments.block_table_BM.astype(jnp.int32),
        arguments.tree_mask_TQ,
        arguments.k_scale,
        arguments.v_scale,
    )
    if apart:
        out_ZTNH, weight_ZTN = result
        return reduce_splits(out_ZTNH, weight_ZTN, splits_T, q_TNH.dtype, interpret=config.interpret)
    return jnp.where((splits_T > 0)[:, None, None], result[0], 0)  # nobody has written the others


def _schedule(arguments: Arguments, cut: QueryCut, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
    """What a program must know of its tile, [R, 8] (see `_Tile`), and the number of splits of each token, 0 for padding."""
    causal_end_R = cut.position_R + cut.count_R
    end_R = causal_end_R if arguments.tree_mask_TQ is None else arguments.context_len_B[cut.row_R]
    end_R = jnp.where(cut.count_R > 0, end_R, 0)
    window = arguments.sliding_window
    begin_R = jnp.zeros_like(end_R) if window is None else jnp.maximum(cut.position_R - window + 1, 0)
    turn_R = begin_R // tiles.context
    turns_R = jnp.maximum((end_R + tiles.context - 1) // tiles.context - turn_R, 0)
    share_R = (turns_R + tiles.max_splits - 1) // tiles.max_splits
    share_R = jnp.maximum(share_R, tiles.split_context // tiles.context) if tiles.max_splits > 1 else share_R
    fields = (cut.row_R, cut.token_R, cut.count_R, cut.position_R, cut.origin_R, begin_R, end_R, share_R)
    splits_R = (turns_R + share_R - 1) // jnp.maximum(share_R, 1)
    splits_T = jnp.where(cut.valid_T, splits_R[cut.tile_T], 0)
    return jnp.stack(fields, axis=1).astype(jnp.int32), splits_T.astype(jnp.int32)


@dataclass(frozen=True)
class _Tile:
    """A program's tile: a row of the schedule."""

    row: jax.Array
    token: jax.Array  # its first in the stream
    count: jax.Array  # of tokens
    position: jax.Array  # of its first token
    origin: jax.Array  # position of the first query token of its row
    begin: jax.Array  # first and last position, and one more, that any of its tokens sees
    end: jax.Array
    share: jax.Array  # turns of a split


@dataclass(frozen=True)
class _Lanes:
    """The rows of a tile's products: query tokens times the G query heads of one key/value head, then padding."""

    token_A: jax.Array  # in the tile
    head_A: jax.Array
    used_A: jax.Array

    @classmethod
    def of(cls, tile: _Tile, kv_head: jax.Array, config: _Config) -> _Lanes:
        lane_A = jnp.arange(config.tiles.query_rows)
        token_A = lane_A // config.group
        return cls(token_A, kv_head * config.group + lane_A % config.group, lane_A < tile.count * config.group)


def _kernel(  # type: ignore[no-untyped-def]
    schedule_ref, q_ref, k_ref, v_ref, table_ref, tree_ref, k_scale_ref, v_scale_ref, *out_refs, config: _Config
) -> None:
    # The last tiles of a prompt see most, and a GPU starts programs in order: the longest go first.
    tile_index = schedule_ref.shape[0] - 1 - pl.program_id(0)
    kv_head, split = pl.program_id(1), pl.program_id(2)
    tile = _Tile(*(tb.load(schedule_ref.at[tile_index, np.int32(field)]) for field in range(8)))
    first = tile.begin // config.tiles.context + split * tile.share
    stop = jnp.minimum(first + tile.share, pl.cdiv(tile.end, config.tiles.context))

    @pl.when(first < stop)
    def _() -> None:
        lanes = _Lanes.of(tile, kv_head, config)
        width = q_ref.shape[2]
        at_H = jnp.arange(max(16, pl.next_power_of_2(width)))
        mask_AH = lanes.used_A[:, None] & (at_H < width)[None, :]
        at_A = tile.token + lanes.token_A, lanes.head_A
        at_AH = at_A[0][:, None], at_A[1][:, None], at_H[None, :]
        q_AH = tb.load(q_ref.at[at_AH], mask=mask_AH, other=0.0)

        def turn(index, carry, *, masked):  # type: ignore[no-untyped-def]
            position_C = index * config.tiles.context + jnp.arange(config.tiles.context)
            needed_C = (position_C >= tile.begin) & (position_C < tile.end) if masked else None
            place = _place(table_ref, tile.row, position_C, needed_C, k_ref.shape[1])
            k_CH = _read(k_ref, place, kv_head, at_H, needed_C, q_AH.dtype)
            scores_AC = tb.dot(q_AH, k_CH, trans_b=True, precision=lax.Precision.HIGHEST)
            scores_AC = _scores(scores_AC, _read_scale(k_scale_ref, place, kv_head, needed_C), config)
            if masked:
                seen_AC = _seen(tile, lanes, position_C, tree_ref, config)
                scores_AC = jnp.where(seen_AC & needed_C[None, :], scores_AC, -jnp.inf)
            top_A, total_A, sum_AH = carry
            new_top_A = jnp.maximum(top_A, jnp.max(scores_AC, axis=1))
            weights_AC = jnp.exp2(scores_AC * factor - (new_top_A * factor)[:, None])
            shrink_A = jnp.exp2((top_A - new_top_A) * factor)
            total_A = total_A * shrink_A + jnp.sum(weights_AC, axis=1)
            v_CH = _read(v_ref, place, kv_head, at_H, needed_C, q_AH.dtype)
            v_scale_C = _read_scale(v_scale_ref, place, kv_head, needed_C)
            if v_scale_C is not None:
                weights_AC *= v_scale_C[None, :]
            values_AH = tb.dot(weights_AC.astype(v_CH.dtype), v_CH, precision=lax.Precision.HIGHEST)
            return new_top_A, total_A, sum_AH * shrink_A[:, None] + values_AH

        size, factor = config.tiles.query_rows, _factor(config)
        carry = jnp.full(size, LOWEST), jnp.zeros(size), jnp.zeros(q_AH.shape, jnp.float32)
        for low, high, masked in _stretches(tile, first, stop, config, tree=tree_ref is not None):
            carry = lax.fori_loop(low, high, functools.partial(turn, masked=masked), carry)
        top_A, total_A, sum_AH = carry
        out_AH = sum_AH / jnp.where(total_A == 0.0, 1.0, total_A)[:, None]
        if len(out_refs) == 1:
            tb.store(out_refs[0].at[at_AH], out_AH.astype(q_AH.dtype), mask=mask_AH)
        else:
            tb.store(out_refs[0].at[(split, *at_AH)], out_AH, mask=mask_AH)
            weight_A = jnp.where(total_A == 0.0, LOWEST, top_A * factor + jnp.log2(total_A))
            tb.store(out_refs[1].at[(split, *at_A)], weight_A, mask=lanes.used_A)


def _stretches(
    tile: _Tile, first: jax.Array, stop: jax.Array, config: _Config, *, tree: bool
) -> list[tuple[jax.Array, jax.Array, bool]]:
    """The turns from `first` to `stop` in order, as (low, high, masked): turns that every token sees whole need no mask.

    A tile of one token keeps to one loop, since between two of them the pipeline of loads runs dry.
    """
    if config.query_tokens == 1 and not tree:
        return [(first, stop, True)]
    context = config.tiles.context
    all_see = tile.origin if tree else tile.position + 1
    stretches, low = [], first
    if config.sliding_window is not None:
        last_begin = jnp.maximum(tile.position + tile.count - config.sliding_window, 0)
        low = jnp.clip(pl.cdiv(last_begin, context), first, stop)
        stretches = [(first, low, True)]
    high = jnp.clip(all_see // context, low, stop)
    return [*stretches, (low, high, False), (high, stop, True)]


def _place(table_ref, row, position_C, needed_C, block_size):  # type: ignore[no-untyped-def]
    """Block and slot of each position. Block sizes are powers of two, and shifts are cheaper than a signed division."""
    at = table_ref.at[row, position_C >> (block_size.bit_length() - 1)]
    block_C = tb.load(at) if needed_C is None else tb.load(at, mask=needed_C, other=0)
    return block_C, position_C & (block_size - 1)


def _read(pages_ref, place, kv_head, at_H, needed_C, dtype):  # type: ignore[no-untyped-def]
    """Keys or values of one head at those places, in the queries' type, without their scales. Zeros where not needed."""
    block_C, slot_C = place
    at = pages_ref.at[block_C[:, None], slot_C[:, None], kv_head, at_H[None, :]]
    width = pages_ref.shape[3]
    mask = None if needed_C is None else needed_C[:, None]
    if at_H.shape[0] != width:
        inside = (at_H < width)[None, :]
        mask = inside if mask is None else mask & inside
    kept = pages_ref.dtype
    other = 0.0 if jnp.issubdtype(kept, jnp.floating) else 0
    x_CH = (
        tb.load(at)
        if mask is None
        else tb.load(at, mask=jnp.broadcast_to(mask, (block_C.shape[0], at_H.shape[0])), other=other)
    )
    if kept == jnp.uint8:
        x_CH = lax.bitcast_convert_type(x_CH, jnp.float8_e4m3fn)
    return x_CH.astype(dtype)


def _read_scale(scale_ref, place, kv_head, needed_C):  # type: ignore[no-untyped-def]
    if scale_ref is None:
        return None
    at = scale_ref.at[place[0], place[1], kv_head]
    return tb.load(at) if needed_C is None else tb.load(at, mask=needed_C, other=0.0)


def _factor(config: _Config) -> float:
    """What turns scores, as the loop keeps them, into exponents of two. Above zero, so that a maximum stays one."""
    return LOG2_E * (config.scale if config.logit_softcap is None and config.scale > 0 else 1.0)


def _scores(scores_AC: jax.Array, k_scale_C: jax.Array | None, config: _Config) -> jax.Array:
    """Products of queries and keys as scores; the attention scale waits for `_factor` where it can."""
    if k_scale_C is not None:
        scores_AC = scores_AC * k_scale_C[None, :]
    if config.logit_softcap is not None:
        return config.logit_softcap * jnp.tanh(scores_AC * (config.scale / config.logit_softcap))
    return scores_AC if config.scale > 0 else scores_AC * config.scale


def _seen(tile: _Tile, lanes: _Lanes, position_C, tree_ref, config: _Config):  # type: ignore[no-untyped-def]
    """Which of the positions each lane sees."""
    own_A = tile.position + lanes.token_A
    if tree_ref is None:
        seen_AC = position_C[None, :] <= own_A[:, None]
    else:
        place_C = position_C - tile.origin  # among the query tokens of the row
        inside_C = (place_C >= 0) & (place_C < tree_ref.shape[1])
        at = tree_ref.at[(tile.token + lanes.token_A)[:, None], place_C[None, :]]
        branch_AC = tb.load(at, mask=lanes.used_A[:, None] & inside_C[None, :], other=False)
        seen_AC = branch_AC | (place_C < 0)[None, :]
    if config.sliding_window is not None:
        seen_AC &= position_C[None, :] > own_A[:, None] - config.sliding_window
    return seen_AC
