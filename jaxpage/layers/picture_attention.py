"""Attends both ways among the patches of a picture, or among those of windows of it.

Queries are computed tile by tile, so that the scores of a large picture need not be there at once.
Padding sees itself alone. Scores and softmax are in float32. On a CPU a kernel computes it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpage.layers.trace_scope import trace_scope

# A tile has at least so many queries, and at most so many, if its scores are not more than these.
_MIN_QUERIES = 64
_MAX_QUERIES = 512
_MAX_SCORES = 2**26  # 256 MiB
# The tiles of windows whose scores are in memory at once.
_WINDOWS_AT_ONCE = 16
_OUTSIDE = -1  # the number of no window
_UNSEEN = -1e30  # the score of a patch that is not seen


def attend_in_segments(
    q_TNH: Float[Array, "T N H"],
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    segment_T: Int[Array, "T"],
    *,
    scale: float,
) -> Float[Array, "T N H"]:
    """Returns for each patch `softmax(scale q . k) v` over the patches of its segment.

    Args:
        q_TNH: The queries.
        k_TKH: The keys; query head n uses key/value head n // (N / K).
        v_TKH: The values.
        segment_T: The number of each patch's segment, whose patches follow each other: the picture,
            a window of it, or padding.
        scale: The factor of scores.
    """
    if (mixed := _attend_in_kernel(q_TNH, k_TKH, v_TKH, segment_T, scale)) is not None:
        return mixed
    num_patches, num_heads, _ = q_TNH.shape
    k_TNH, v_TNH = (jnp.repeat(each, num_heads // each.shape[1], axis=1) for each in (k_TKH, v_TKH))

    def attend_tile(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_QNH, segment_Q = tile
        return _attend(q_QNH, k_TNH, v_TNH, segment_Q[:, None] == segment_T[None, :], scale)

    num_queries = queries_at_once(num_patches, num_heads)
    if num_patches <= num_queries:
        return attend_tile((q_TNH, segment_T))
    by_tile: jax.Array = jax.lax.map(
        attend_tile, (_tiles(q_TNH, num_queries), _tiles(segment_T, num_queries))
    )
    return by_tile.reshape(-1, *q_TNH.shape[1:])[:num_patches]


def queries_at_once(num_patches: int, num_heads: int) -> int:
    """Returns the number of queries in a tile; plans of memory count the scores of one."""
    fitting = max(_MIN_QUERIES, _MAX_SCORES // (num_heads * num_patches))
    return min(_MAX_QUERIES, fitting)


def _attend_in_kernel(
    q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, segment_T: jax.Array, scale: float
) -> jax.Array | None:
    """Returns the result of the kernel for CPUs; None where none takes these heads."""
    kernels = trace_scope().kernels
    if kernels is None or kernels.attend_bidirectional is None:
        return None
    return kernels.attend_bidirectional(q_TNH, k_TKH, v_TKH, segment_T, scale=scale)


def attend_in_windows(
    q_TNH: Float[Array, "T N H"],
    k_TNH: Float[Array, "T N H"],
    v_TNH: Float[Array, "T N H"],
    window_T: Int[Array, "T"],
    *,
    max_length: int,
    scale: float,
) -> Float[Array, "T N H"]:
    """Returns what `attend_in_segments` does, for segments that are short and without a gap.

    In tiles that are as long as the longest window, the window of a patch is within its own tile
    and the two next to it:

        tiles      | 1 1 1 2 | 2 2 3 3 | 3 4 4 0 |
        keys of    |<------- the second one ---->|

    Args:
        q_TNH: The queries.
        k_TNH: The keys.
        v_TNH: The values.
        window_T: The number of each patch's window, from 1; 0 for padding.
        max_length: The most patches of a window.
        scale: The factor of scores.
    """
    if (mixed := _attend_in_kernel(q_TNH, k_TNH, v_TNH, window_T, scale)) is not None:
        return mixed
    window_GQ = _tiles(window_T, max_length)
    seen = (
        _with_neighbours(_tiles(k_TNH, max_length), 0),
        _with_neighbours(_tiles(v_TNH, max_length), 0),
        _with_neighbours(window_GQ, _OUTSIDE),
    )

    def attend_tile(tile: tuple[jax.Array, ...]) -> jax.Array:
        q_QNH, window_Q, k_KNH, v_KNH, window_K = tile
        return _attend(q_QNH, k_KNH, v_KNH, window_Q[:, None] == window_K[None, :], scale)

    tiles = (_tiles(q_TNH, max_length), window_GQ, *seen)
    by_tile: jax.Array = jax.lax.map(attend_tile, tiles, batch_size=_WINDOWS_AT_ONCE)
    return by_tile.reshape(-1, *q_TNH.shape[1:])[: len(q_TNH)]


def _attend(
    q_QNH: Float[Array, "Q N H"],
    k_KNH: Float[Array, "K N H"],
    v_KNH: Float[Array, "K N H"],
    sees_QK: Bool[Array, "Q K"],
    scale: float,
) -> Float[Array, "Q N H"]:
    """Returns the sum of values by the weights of their keys."""
    is_float32 = q_QNH.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if is_float32 else jax.lax.Precision.DEFAULT

    def multiply(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(formula, x, y, precision=precision, preferred_element_type=jnp.float32)

    score_NQK = multiply("QNH,KNH->NQK", q_QNH, k_KNH) * scale
    weight_NQK = jax.nn.softmax(jnp.where(sees_QK[None], score_NQK, _UNSEEN), axis=-1)
    mixed_QNH = multiply("NQK,KNH->QNH", weight_NQK.astype(v_KNH.dtype), v_KNH)
    return mixed_QNH.astype(q_QNH.dtype)


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
