"""Computes the attention of encoders of pictures, whose patches see each other both ways."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_NUM_QUERIES = 512  # the queries of a tile, so that scores are never more than [N, 512, T]
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
