"""A step's metadata as one int32 vector: one transfer in, sliced again on the device. Floats and seeds travel as their bits."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxpage.device.buckets import Bucket

NUM_SUPPRESSED = 16  # token ids per row that may not be drawn


class StepInputs(NamedTuple):
    """The fields in the order in which they are packed. The builder writes them as numpy views, the step reads them as arrays."""

    token_ids_T: jax.Array
    positions_T: jax.Array
    slots_T: jax.Array  # where each token's key and value go: block * S + offset; padding goes to block 0
    block_table_BM: jax.Array
    context_len_B: jax.Array
    query_start: jax.Array  # [B + 1]
    drawn_token_B: jax.Array  # index into the stream of the token whose logits are drawn from
    temperature_B: jax.Array  # 0 is greedy
    top_k_B: jax.Array  # 0 is off
    top_p_B: jax.Array
    min_p_B: jax.Array
    seed_B2: jax.Array  # the noise key's two words
    sample_index_B: jax.Array
    drawn_position_B: jax.Array  # the place that the drawn token takes in its sequence
    suppressed_BE: jax.Array  # token ids that may not be drawn; padded with V
    flags: jax.Array  # [2]: any row draws at random; any row wants log probabilities


_FLOATS = frozenset({"temperature_B", "top_p_B", "min_p_B"})
_WORDS = frozenset({"seed_B2"})


def _shapes(bucket: Bucket, table_width: int) -> dict[str, tuple[int, ...]]:
    tokens, rows = bucket.num_tokens, bucket.num_rows
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(StepInputs._fields, (rows,))
    shapes |= dict.fromkeys(("token_ids_T", "positions_T", "slots_T"), (tokens,))
    shapes |= {"block_table_BM": (rows, table_width), "query_start": (rows + 1,), "seed_B2": (rows, 2), "flags": (2,)}
    shapes["suppressed_BE"] = (rows, NUM_SUPPRESSED)
    return shapes


def packed_size(bucket: Bucket, table_width: int) -> int:
    return max(place.stop for place, _ in _slices(bucket, table_width).values())


@functools.cache  # asked for at every step, for a handful of buckets
def _slices(bucket: Bucket, table_width: int) -> dict[str, tuple[slice, tuple[int, ...]]]:
    start, slices = 0, {}
    for name, shape in _shapes(bucket, table_width).items():
        stop = start + math.prod(shape)
        slices[name] = (slice(start, stop), shape)
        start = stop
    return slices


def views(packed: npt.NDArray[np.int32], bucket: Bucket, table_width: int) -> dict[str, npt.NDArray[np.generic]]:
    """The fields of a host vector, to be written in place."""
    fields: dict[str, npt.NDArray[np.generic]] = {}
    for name, (place, shape) in _slices(bucket, table_width).items():
        dtype = np.float32 if name in _FLOATS else np.uint32 if name in _WORDS else np.int32
        fields[name] = packed[place].view(dtype).reshape(shape)
    return fields


def unpack(packed: jax.Array, bucket: Bucket, table_width: int) -> StepInputs:
    """The fields on the device."""
    fields = {}
    for name, (place, shape) in _slices(bucket, table_width).items():
        dtype = jnp.float32 if name in _FLOATS else jnp.uint32 if name in _WORDS else jnp.int32
        fields[name] = jax.lax.bitcast_convert_type(packed[place], dtype).reshape(shape)
    return StepInputs(**fields)
