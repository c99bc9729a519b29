"""Attends among tokens of a text, or patches of a picture, that see each other both ways, in C++.

Nothing is kept in pages: queries, keys and values are all there. Scores of a token are computed as
a whole, in float32, and its sums are made in one order whatever other texts there are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu import library

LANES = 16  # a head is a number of whole vectors


def takes(dtype: DTypeLike, head_dim: int) -> bool:
    """Returns whether there is a kernel for heads of this type and width on this machine."""
    return not library.load().reason and dtype == jnp.float32 and head_dim % LANES == 0


def attend_bidirectional(
    q_TNH: Float[Array, "T N H"],
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    segment_T: Int[Array, "T"],
    *,
    scale: float,
    reach: int | None = None,
) -> Float[Array, "T N H"]:
    """Returns for each token `softmax(scale q . k) v` over the tokens of its segment.

    Args:
        q_TNH: The queries.
        k_TKH: The keys; query head n uses key/value head n // (N / K).
        v_TKH: The values.
        segment_T: The number of each token's segment, whose tokens follow each other: a text, a
            picture, or a window of it. Tokens with a negative number see nothing and get zeros.
        scale: The factor of scores.
        reach: How many positions to both sides a token sees; None for all.
    """
    shape = jax.ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype)
    call = jax.ffi.ffi_call("jaxpage_attend_bidirectional", shape, vmap_method="sequential")
    out_TNH: jax.Array = call(
        q_TNH,
        k_TKH,
        v_TKH,
        segment_T.astype(jnp.int32),
        # Attributes have the very types that C++ reads: a Python number would be a double.
        scale=np.float32(scale),
        reach=np.int64(-1 if reach is None else reach),
    )
    return out_TNH
