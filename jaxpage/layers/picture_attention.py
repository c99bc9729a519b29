"""Attends both ways among the tokens of one picture, or among those of windows of it.

Queries are computed tile by tile, so that the scores of a large picture need not be there at once.
Tokens after the last one of the picture are padding: they are not seen, and see no other ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

QUERY_TILE = 128
WINDOWS_AT_ONCE = 16
_OUTSIDE = -1  # a number that no window has
_NUM_QUERIES = 512  # the queries of a tile, so that scores are never more than [N, 512, T]
_UNSEEN = -1e30  # the score of a patch that is not seen


def attend_to_picture(
    q_TNH: Float[Array, "T N H"],
    k_TNH: Float[Array, "T N H"],
    v_TNH: Float[Array, "T N H"],
    *,
    num_tokens: Int[Array, ""],
    scale: float,
) -> Float[Array, "T N H"]:
    """Returns for each token `softmax(scale * q . k) v` over the first `num_tokens` tokens."""
    tile = min(QUERY_TILE, len(q_TNH))
    sees_1K = (jnp.arange(len(k_TNH)) < num_tokens)[None]
    q_GQNH = _tiles(q_TNH, tile)
    out_GQNH = jax.lax.map(lambda q_QNH: _attend(q_QNH, k_TNH, v_TNH, sees_1K, scale), q_GQNH)
    return out_GQNH.reshape(-1, *q_TNH.shape[1:])[: len(q_TNH)]


def attend_in_windows(
    q_TNH: Float[Array, "T N H"],
    k_TNH: Float[Array, "T N H"],
    v_TNH: Float[Array, "T N H"],
    *,
    window_T: Int[Array, "T"],
    longest: int,
    scale: float,
) -> Float[Array, "T N H"]:
    """Returns for each token `softmax(scale * q . k) v` over the tokens of its window.

    With tiles as long as the longest window, a token's window is in its own tile and the two next
    to it.

    Args:
        q_TNH: The queries.
        k_TNH: The keys.
        v_TNH: The values.
        window_T: The number of each token's window, from 1, or 0 for padding. The tokens of a
            window follow each other.
        longest: The most tokens of a window.
        scale: The factor of the scores.
    """
    window_GQ = _tiles(window_T, longest)
    seen = (
        _with_neighbours(_tiles(k_TNH, longest), 0),
        _with_neighbours(_tiles(v_TNH, longest), 0),
        _with_neighbours(window_GQ, _OUTSIDE),
    )

    def attend_tile(tile: tuple[jax.Array, ...]) -> jax.Array:
        q_QNH, window_Q, k_KNH, v_KNH, window_K = tile
        sees_QK = window_Q[:, None] == window_K[None, :]
        return _attend(q_QNH, k_KNH, v_KNH, sees_QK, scale)

    tiles = (_tiles(q_TNH, longest), window_GQ, *seen)
    out_GQNH = jax.lax.map(attend_tile, tiles, batch_size=WINDOWS_AT_ONCE)
    return out_GQNH.reshape(-1, *q_TNH.shape[1:])[: len(q_TNH)]


def attend_in_segments(
    q_TNH: Float[Array, "T N H"],
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    segment_T: Int[Array, "T"],
    *,
    scale: float,
) -> Float[Array, "T N H"]:
    """Returns for each patch `softmax(scale q . k) v` over the patches of its segment.

    Padding is a segment of its own. Scores and softmax are in float32.

    Args:
        q_TNH: The queries.
        k_TKH: The keys; query head n uses key/value head n // (N / K).
        v_TKH: The values.
        segment_T: The number of each patch's segment: the picture, or a window of it.
        scale: The factor of scores.
    """
    num_patches, num_heads, _ = q_TNH.shape
    k_TNH, v_TNH = (jnp.repeat(each, num_heads // each.shape[1], axis=1) for each in (k_TKH, v_TKH))
    is_float32 = q_TNH.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if is_float32 else jax.lax.Precision.DEFAULT

    def multiply(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(formula, x, y, precision=precision, preferred_element_type=jnp.float32)

    def attend(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_QNH, segment_Q = tile
        score_NQT = multiply("QNH,TNH->NQT", q_QNH, k_TNH) * scale
        sees_QT = segment_Q[:, None] == segment_T[None, :]
        weight_NQT = jax.nn.softmax(jnp.where(sees_QT, score_NQT, _UNSEEN), axis=-1)
        mixed_QNH = multiply("NQT,TNH->QNH", weight_NQT.astype(v_TNH.dtype), v_TNH)
        return mixed_QNH.astype(q_TNH.dtype)

    if num_patches <= _NUM_QUERIES:
        return attend((q_TNH, segment_T))
    lacking = -num_patches % _NUM_QUERIES
    queries = jnp.pad(q_TNH, ((0, lacking), (0, 0), (0, 0)))
    segments = jnp.pad(segment_T, (0, lacking))
    tiles = queries.reshape(-1, _NUM_QUERIES, *q_TNH.shape[1:]), segments.reshape(-1, _NUM_QUERIES)
    mixed: jax.Array = jax.lax.map(attend, tiles)
    return mixed.reshape(-1, *q_TNH.shape[1:])[:num_patches]


def _attend(
    q_QNH: Float[Array, "Q N H"],
    k_KNH: Float[Array, "K N H"],
    v_KNH: Float[Array, "K N H"],
    sees_QK: Bool[Array, "#Q K"],
    scale: float,
) -> Float[Array, "Q N H"]:
    """Returns the values by the weights of their keys; scores and softmax are in float32."""
    wide = q_QNH.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT
    score_NQK = scale * jnp.einsum(
        "QNH,KNH->NQK", q_QNH, k_KNH, precision=precision, preferred_element_type=jnp.float32
    )
    weight_NQK = jax.nn.softmax(jnp.where(sees_QK[None], score_NQK, -jnp.inf), axis=-1)
    return jnp.einsum("NQK,KNH->QNH", weight_NQK.astype(v_KNH.dtype), v_KNH, precision=precision)


def _tiles(x: jax.Array, size: int) -> jax.Array:
    """Returns an array in tiles of this size, the last one filled up with zeros."""
    missing = -len(x) % size
    padded = jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)))
    return padded.reshape(-1, size, *x.shape[1:])


def _with_neighbours(tiles: jax.Array, outside: int) -> jax.Array:
    """Returns each tile between the one before it and the one after it."""
    widths = ((1, 1), *((0, 0),) * (tiles.ndim - 1))
    padded = jnp.pad(tiles, widths, constant_values=outside)
    return jnp.concatenate([padded[:-2], padded[1:-1], padded[2:]], axis=1)
