"""Packs what a step draws into one array that leaves the device, and reads it on the host."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxpage.device.sampler import log_probabilities
from jaxpage.shapes import NUM_CANDIDATES


class Drawn(NamedTuple):
    """Holds draws of a step, or given tokens that were scored, on the host.

    Log probabilities are zeros unless a row asked for them.
    """

    token_ids: npt.NDArray[np.int32]  # [B]
    logprobs: npt.NDArray[np.float32]  # [B]
    ranks: npt.NDArray[np.int32]  # [B]
    top_token_ids: npt.NDArray[np.int32]  # [B, W]
    top_logprobs: npt.NDArray[np.float32]  # [B, W]


def pack_drawn(
    logits_BV: jax.Array, token_ids_B: jax.Array, has_logprobs: jax.Array | bool, *, by_row: bool
) -> jax.Array:
    """Returns draws, and their log probabilities if any row asks, as int32 [B, 3 + 2 W]."""

    def with_logprobs() -> jax.Array:
        logprobs_B, ranks_B, ids_BW, top_BW = log_probabilities(
            logits_BV, token_ids_B, by_row=by_row
        )
        return jnp.concatenate(
            [bits_of(logprobs_B[:, None]), ranks_B[:, None], ids_BW, bits_of(top_BW)], axis=1
        )

    num_candidates = min(NUM_CANDIDATES, logits_BV.shape[1])
    width = 2 + 2 * num_candidates
    logprobs = jax.lax.cond(
        has_logprobs, with_logprobs, lambda: jnp.zeros((logits_BV.shape[0], width), jnp.int32)
    )
    return jnp.concatenate([token_ids_B[:, None], logprobs], axis=1)


def bits_of(values: jax.Array) -> jax.Array:
    """Returns float32 numbers as int32, to travel among integers."""
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def unpack_drawn(packed: npt.NDArray[np.int32], num_rows: int) -> Drawn:
    """Returns the first `num_rows` rows of one of a step's arrays, on the host."""
    rows = np.ascontiguousarray(packed[:num_rows])
    num_candidates = (rows.shape[1] - 3) // 2
    floats = rows.view(np.float32)
    return Drawn(
        rows[:, 0],
        floats[:, 1],
        rows[:, 2],
        rows[:, 3 : 3 + num_candidates],
        floats[:, 3 + num_candidates :],
    )
