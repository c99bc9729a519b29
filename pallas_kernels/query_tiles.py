"""Cuts the query tokens of a ragged stream into tiles of one row each."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arguments


@dataclass(frozen=True)
class TokenRows:
    """Holds the row of each query token, its place in that row, and its position in the context."""

    row_T: jax.Array
    offset_T: jax.Array
    position_T: jax.Array
    valid_T: jax.Array  # False for padding after the last row


@dataclass(frozen=True)
class QueryCut:
    """Holds the cut of a stream into R tiles of at most Q tokens of one row each.

    Attributes:
        row_R: The row of each tile.
        token_R: The first token of each tile in the stream.
        count_R: The tokens of each tile; 0 for a tile that no row needs.
        position_R: The position of its first token.
        origin_R: The position of the first query token of its row.
        tile_T: The tile of each token.
        offset_T: The place of each token in its tile.
        valid_T: False for padding after the last row.
    """

    row_R: jax.Array
    token_R: jax.Array
    count_R: jax.Array
    position_R: jax.Array
    origin_R: jax.Array
    tile_T: jax.Array
    offset_T: jax.Array
    valid_T: jax.Array


@dataclass(frozen=True)
class QueryTiles:
    """Holds the query tokens in R tiles of Q tokens of one row each.

    Attributes:
        row_R: The row of each tile.
        token_RQ: The index of each token in the stream, clipped to the stream.
        position_RQ: The position of each token; -1 where the tile has no token.
        tile_T: The tile of each token.
        offset_T: The place of each token in its tile.
        valid_T: False for padding after the last row.
    """

    row_R: jax.Array
    token_RQ: jax.Array
    position_RQ: jax.Array
    tile_T: jax.Array
    offset_T: jax.Array
    valid_T: jax.Array


def token_rows(context_len_B: jax.Array, query_start: jax.Array, num_tokens: int) -> TokenRows:
    """Returns the row and the position of each query token of a stream."""
    token_T = jnp.arange(num_tokens, dtype=query_start.dtype)
    # One fused comparison; by default it is a loop, whose turns a GPU launches one by one.
    row_T = jnp.searchsorted(query_start[1:], token_T, side="right", method="compare_all")
    valid_T = token_T < query_start[-1]
    # Padding after the last row counts to it, and is not valid.
    row_T = jnp.minimum(row_T, context_len_B.shape[0] - 1).astype(query_start.dtype)
    offset_T = token_T - query_start[row_T]
    first_T = context_len_B[row_T] - (query_start[row_T + 1] - query_start[row_T])
    return TokenRows(row_T, offset_T, first_T + offset_T, valid_T)


def num_query_tiles(arguments: Arguments, tile: int) -> int:
    """Returns R: as many tiles of `tile` tokens as any rows of these shapes can need."""
    num_tokens = arguments.q_TNH.shape[0]
    num_rows = arguments.context_len_B.shape[0]
    # A row has one tile at most that is not full.
    return num_rows if arguments.max_query_len <= tile else num_tokens // tile + num_rows


def query_cut(arguments: Arguments, tile: int) -> QueryCut:
    """Cuts the stream into tiles of Q = `tile` tokens.

    The tiles of a row follow each other. If a tile can hold any row whole, tile b is that of row b.
    """
    num_tokens = arguments.q_TNH.shape[0]
    num_rows = arguments.context_len_B.shape[0]
    num_tiles = num_query_tiles(arguments, tile)
    rows = token_rows(arguments.context_len_B, arguments.query_start, num_tokens)
    query_len_B = arguments.query_start[1:] - arguments.query_start[:-1]
    if arguments.max_query_len <= tile:
        tile_start_B = row_R = jnp.arange(num_rows)
    else:
        tile_end_B = jnp.cumsum((query_len_B + tile - 1) // tile)
        tile_start_B = tile_end_B - (query_len_B + tile - 1) // tile
        row_R = jnp.searchsorted(
            tile_end_B, jnp.arange(num_tiles), side="right", method="compare_all"
        )
        # Tiles after the last that is needed are given to the last row, of which they have no
        # tokens.
        row_R = jnp.minimum(row_R, num_rows - 1)
    offset_R = (jnp.arange(num_tiles) - tile_start_B[row_R]) * tile
    origin_R = (arguments.context_len_B - query_len_B)[row_R]
    return QueryCut(
        row_R=row_R,
        token_R=arguments.query_start[row_R] + offset_R,
        count_R=jnp.clip(query_len_B[row_R] - offset_R, 0, tile),
        position_R=origin_R + offset_R,
        origin_R=origin_R,
        tile_T=tile_start_B[rows.row_T] + rows.offset_T // tile,
        offset_T=rows.offset_T % tile,
        valid_T=rows.valid_T,
    )


def query_tiles(arguments: Arguments, tile: int) -> QueryTiles:
    """Makes the same cut as `query_cut`, with an entry for each of the Q = `tile` tokens."""
    cut = query_cut(arguments, tile)
    offset_Q = jnp.arange(tile)
    has_token_RQ = offset_Q < cut.count_R[:, None]
    token_RQ = jnp.clip(cut.token_R[:, None] + offset_Q, 0, arguments.q_TNH.shape[0] - 1)
    position_RQ = jnp.where(has_token_RQ, cut.position_R[:, None] + offset_Q, -1)
    return QueryTiles(cut.row_R, token_RQ, position_RQ, cut.tile_T, cut.offset_T, cut.valid_T)


def mask_words(mask_TQ: jax.Array) -> jax.Array:
    """Returns a mask over the query tokens of a row as int32 [T, ceil(Q / 32)].

    Bit j % 32 of word j // 32 is that of token j.
    """
    padded = jnp.pad(mask_TQ, ((0, 0), (0, -mask_TQ.shape[1] % 32)))
    bits = padded.reshape(len(padded), -1, 32).astype(jnp.uint32) << jnp.arange(
        32, dtype=jnp.uint32
    )
    return jax.lax.bitcast_convert_type(jnp.sum(bits, axis=2, dtype=jnp.uint32), jnp.int32)
