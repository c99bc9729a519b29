"""Defines the kernel set in plain XLA for CPU, whose attention loops over tiles of the context.

Query tokens are grouped into tiles of one row each. Every turn of the loop gathers one tile of the
context for all of them and continues an online softmax. The loop ends at the longest context of the
step, so short steps stay cheap although all shapes are static.

A token's result is a function of its row alone, to the last bit, whatever else is in the call. It
does not depend on the block size, the width of the block table, the other rows, or how many query
tokens its row has. Four habits make it so in float32 on CPU: tiles of the context have a fixed
size; matrix products have from 2 to 32 rows, since XLA computes fewer or many more on other paths;
heads have a multiple of 16 numbers in them, since with 4 or 8 XLA rounds by the number of rows on a
processor without AVX-512; and sums are written out by halves, since XLA splits a plain reduction
differently for different shapes.

With a tree mask a token is a tile of its own, and the tokens that it sees of its row follow the
context in the order of the row. So a token of a tree has, to the last bit, the result that it would
have at the end of its branch alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arguments
from pallas_kernels.kernel_set import Call
from pallas_kernels.page_layouts import separate
from pallas_kernels.quantized_pages import dequantize
from pallas_kernels.query_tiles import QueryTiles, query_tiles, token_rows
from pallas_kernels.sets import reference

# The positions of a tile: the fastest of 16, 32, 64 and 128 for one token a row (docs/lab-log.md).
CONTEXT_TILE = 64
QUERY_TILE = 16  # the most tokens of a row in a tile
# The most rows of a tile's matrix products: XLA computes 64 and more on yet another path.
QUERY_ROWS = 32
WIDTHS = 16  # heads are multiplied in multiples of it
MASKED = -1e30  # finite, so that a row that sees nothing gives no NaN

# Products are in float32, without TF32 on GPUs.
_matmul = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def attend(arguments: Arguments) -> jax.Array:
    """Returns out_TNH in the queries' type."""
    tree = arguments.options.tree_mask_TQ is not None
    tiles = _tree_tiles(arguments) if tree else query_tiles(arguments, _query_tile(arguments))
    q_RKAH = _queries(arguments, tiles)
    out_RKAH = _online_softmax(arguments, tiles, q_RKAH)
    num_tiles, query_tile = tiles.token_RQ.shape
    num_kv_heads = arguments.num_kv_heads
    width = arguments.out_width
    group = arguments.group
    # This drops the copy of a lone query that `_queries` made.
    out_RKAH = out_RKAH[:, :, : query_tile * group]
    out_RQNH = out_RKAH.reshape(num_tiles, num_kv_heads, query_tile, group, width).swapaxes(1, 2)
    out_TNH = out_RQNH.reshape(num_tiles, query_tile, -1, width)[tiles.tile_T, tiles.offset_T]
    return jnp.where(tiles.valid_T[:, None, None], out_TNH, 0.0).astype(arguments.q_TNH.dtype)


def _query_tile(arguments: Arguments) -> int:
    maximum = max(1, min(QUERY_TILE, QUERY_ROWS // arguments.group))
    return 1 if arguments.max_query_len == 1 else maximum


def _tree_tiles(arguments: Arguments) -> QueryTiles:
    """Returns a tile for each token, at the position that its branch gives it."""
    tree_mask_TQ = arguments.options.tree_mask_TQ
    assert tree_mask_TQ is not None
    num_tokens = arguments.q_TNH.shape[0]
    rows = token_rows(arguments.context_len_B, arguments.query_start, num_tokens)
    token_T = jnp.arange(num_tokens)
    depth_T = jnp.sum(tree_mask_TQ, axis=1, dtype=rows.position_T.dtype)
    position_T = jnp.where(rows.valid_T, rows.position_T - rows.offset_T + depth_T - 1, -1)
    return QueryTiles(
        rows.row_T,
        token_T[:, None],
        position_T[:, None],
        token_T,
        jnp.zeros_like(token_T),
        rows.valid_T,
    )


def _queries(arguments: Arguments, tiles: QueryTiles) -> jax.Array:
    """Returns q_RKAH in float32, scaled.

    A = Q x G is the number of query heads of one key/value head, and at least two.
    """
    num_kv_heads = arguments.num_kv_heads
    width = arguments.q_TNH.shape[2]
    num_tiles, query_tile = tiles.token_RQ.shape
    q = arguments.q_TNH[tiles.token_RQ].astype(jnp.float32) * arguments.options.scale
    q = (
        q.reshape(num_tiles, query_tile, num_kv_heads, -1, width)
        .swapaxes(1, 2)
        .reshape(num_tiles, num_kv_heads, -1, width)
    )
    # XLA multiplies a single row on another path, with other bits, so a lone query is doubled.
    return jnp.repeat(q, 2, axis=2) if q.shape[2] == 1 else q


def _online_softmax(arguments: Arguments, tiles: QueryTiles, q_RKAH: jax.Array) -> jax.Array:
    options = arguments.options
    group = arguments.group
    position_RA = jnp.repeat(
        tiles.position_RQ, q_RKAH.shape[2] // tiles.position_RQ.shape[1], axis=1
    )
    assert q_RKAH.shape[2] == max(2, tiles.position_RQ.shape[1] * group)
    table_RM = _pad_table(arguments)[tiles.row_R]
    last_R = jnp.max(tiles.position_RQ, axis=1)
    first = jnp.zeros((), jnp.int32)
    last = jnp.max(last_R).astype(jnp.int32)
    first_R = jnp.zeros_like(last_R)
    context_tile = _branch_tiles(arguments) if options.tree_mask_TQ is not None else _context_tile
    window = options.sliding_window
    chunk = options.attention_chunk
    if window is not None or chunk is not None:
        # Padding is at position -1, from which the loop would begin at the first tile.
        lowest_R = jnp.min(jnp.where(tiles.position_RQ < 0, last, tiles.position_RQ), axis=1)
        first_R = _first_seen(lowest_R, window, chunk)
        first = jnp.min(first_R).astype(jnp.int32)

    def body(
        index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top_RKA, total_RKA, out_RKAH = carry
        position_C = index * CONTEXT_TILE + jnp.arange(CONTEXT_TILE)
        tile = functools.partial(context_tile, table_RM=table_RM, index=index)
        k_RCKH = dequantize(*jax.tree.map(tile, (arguments.k_pages, arguments.k_scale)))
        if arguments.interleaved:
            k_RCKH, v_RCKH = separate(k_RCKH, arguments.q_TNH.shape[2])
        elif arguments.v_pages is None:
            v_RCKH = k_RCKH[..., : arguments.out_width]
        else:
            v_RCKH = dequantize(*jax.tree.map(tile, (arguments.v_pages, arguments.v_scale)))
        # Slots before the window or after the end of a context may hold anything, even NaN, and
        # zero times NaN is NaN.
        needed_RC = (position_C >= first_R[:, None]) & (position_C <= last_R[:, None])
        v_RCKH = jnp.where(needed_RC[:, :, None, None], v_RCKH, 0.0)
        scores = _matmul("rkah,rckh->rkac", _widen(q_RKAH), _widen(k_RCKH))
        if options.logit_softcap is not None:
            scores = options.logit_softcap * jnp.tanh(scores / options.logit_softcap)
        back_RAC = position_RA[:, :, None] - position_C
        if options.alibi_slopes is not None:
            scores -= _of_queries(options.alibi_slopes, group, shape)[..., None] * back_RAC[:, None]
        seen = back_RAC >= 0
        if window is not None or chunk is not None:
            seen &= position_C >= _first_seen(position_RA, window, chunk)[:, :, None]
        scores = jnp.where(seen[:, None], scores, MASKED)
        new_top = jnp.maximum(top_RKA, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(top_RKA - new_top)
        added_RKAH = _matmul("rkac,rckh->rkah", weights, _widen(v_RCKH))
        new_out = out_RKAH * shrink[..., None] + added_RKAH[..., : arguments.out_width]
        return new_top, total_RKA * shrink + _sum_by_halves(weights), new_out

    shape = q_RKAH.shape[:3]
    top_RKA = jnp.full(shape, MASKED)
    total_RKA = jnp.zeros(shape)
    if options.sinks is not None:  # the softmax begins with them
        top_RKA = jnp.maximum(_of_queries(options.sinks, group, shape), MASKED)
        total_RKA = jnp.ones(shape)  # exp(sink - top), with the sink as the top
    start = (top_RKA, total_RKA, jnp.zeros((*shape, arguments.out_width)))
    _, total_RKA, out_RKAH = jax.lax.fori_loop(
        first // CONTEXT_TILE, last // CONTEXT_TILE + 1, body, start
    )
    return out_RKAH / jnp.where(total_RKA == 0.0, 1.0, total_RKA)[..., None]


def _first_seen(position: jax.Array, window: int | None, chunk: int | None) -> jax.Array:
    """Returns the first position that a token at each position sees."""
    first = jnp.zeros_like(position)
    if window is not None:
        first = jnp.maximum(first, position - window + 1)
    return first if chunk is None else jnp.maximum(first, position - position % chunk)


def _of_queries(of_heads_N: jax.Array, group: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns a number of each query head for every query of a tile, in this shape [R, K, A]."""
    tiled_KA = jnp.tile(of_heads_N.reshape(-1, group), (1, shape[2] // group))
    return jnp.broadcast_to(tiled_KA, shape)


def _widen(x: jax.Array) -> jax.Array:
    """Returns heads with zeros after their numbers, up to a multiple of `WIDTHS`."""
    lacking = -x.shape[-1] % WIDTHS
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, lacking)])


def _sum_by_halves(x: jax.Array) -> jax.Array:
    """Returns the sum over the last axis, in an order that no compiler changes."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _pad_table(arguments: Arguments) -> jax.Array:
    """Returns the block table, widened with null blocks to whole tiles of the context."""
    # `dynamic_slice` moves a slice that ends after the table back into it, so the last tile would
    # have the positions of others.
    blocks_per_tile = max(1, CONTEXT_TILE // arguments.k_pages.shape[1])
    return jnp.pad(
        arguments.block_table_BM,
        ((0, 0), (0, -arguments.block_table_BM.shape[1] % blocks_per_tile)),
    )


@jax.named_scope("gather")  # for profiles: see `jaxpage.bench.studies.step_profile`
def _context_tile(pages: jax.Array, table_RM: jax.Array, index: jax.Array) -> jax.Array:
    """Returns tile number `index` of every row's context, [R, C, ...], from pages [P, S, ...]."""
    block_size = pages.shape[1]
    if block_size <= CONTEXT_TILE:
        blocks_per_tile = CONTEXT_TILE // block_size
        blocks = jax.lax.dynamic_slice_in_dim(
            table_RM, index * blocks_per_tile, blocks_per_tile, axis=1
        )
        tile = pages[blocks].reshape(table_RM.shape[0], CONTEXT_TILE, *pages.shape[2:])
    else:
        block = jax.lax.dynamic_index_in_dim(
            table_RM, index * CONTEXT_TILE // block_size, axis=1, keepdims=False
        )
        tile = jax.lax.dynamic_slice_in_dim(
            pages[block], index * CONTEXT_TILE % block_size, CONTEXT_TILE, axis=1
        )
    return tile


def _branch_tiles(arguments: Arguments) -> Callable[..., jax.Array]:
    """Returns the function that replaces `_context_tile` for tiles of one token each.

    It gathers slot by slot, and of the row's query tokens only those that the token sees, one after
    the other. The tiles are in the order of the stream.
    """
    tree_mask_TQ = arguments.options.tree_mask_TQ
    assert tree_mask_TQ is not None
    rows = token_rows(arguments.context_len_B, arguments.query_start, arguments.q_TNH.shape[0])
    first_R = rows.position_T - rows.offset_T
    # The places that each token sees come first, in ascending order.
    seen_RQ = jnp.argsort(~tree_mask_TQ, axis=1, stable=True)

    @jax.named_scope("gather")
    def branch_tile(pages: jax.Array, table_RM: jax.Array, index: jax.Array) -> jax.Array:
        position_C = index * CONTEXT_TILE + jnp.arange(CONTEXT_TILE)
        depth_RC = position_C - first_R[:, None]
        index_RC = jnp.take_along_axis(seen_RQ, jnp.clip(depth_RC, 0, seen_RQ.shape[1] - 1), axis=1)
        source_RC = jnp.where(depth_RC < 0, position_C, first_R[:, None] + index_RC)
        block_size = pages.shape[1]
        block_RC = jnp.take_along_axis(
            # Positions after the end of the table are masked later. Here they only need a valid
            # index.
            table_RM,
            jnp.minimum(source_RC // block_size, table_RM.shape[1] - 1),
            axis=1,
        )
        return pages[block_RC, source_RC % block_size]

    return branch_tile


def _supports(device: Any, call: Call) -> str | None:
    block_size = 1 if call.attention is None else call.attention.k_pages.shape[1]
    # A tile of the context must be whole blocks, or a part of one block.
    if block_size & (block_size - 1) or block_size > 2 * CONTEXT_TILE:
        return f"blocks of {block_size} slots (powers of two up to {2 * CONTEXT_TILE} only)"
    return reference.supports(device, call)


SET = dataclasses.replace(
    reference.SET,
    name="scan",
    attend=attend,
    honours=frozenset(
        {"scale", "sliding_window", "logit_softcap", "value_width", "sinks", "alibi_slopes"}
        | {"attention_chunk", "tree_mask_TQ"}
    ),
    supports=_supports,
)
