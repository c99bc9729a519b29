"""Packs what a step draws into one array that leaves the device, and reads it on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxpage.device.inputs.step_inputs import Flags, ProcessorInputs, StepInputs
from jaxpage.device.sampler import in_parts, scale_logits
from jaxpage.device.token_logprobs import log_probabilities
from jaxpage.shapes import NUM_CANDIDATES
from jaxpage.step.token_masks import MASK_BITS

_NUM_KEPT = 3  # the column of `Drawn.num_kept`


class Drawn(NamedTuple):
    """Holds draws of a step, or given tokens that were scored, on the host.

    Log probabilities are zeros unless a row asked for them.
    """

    token_ids: npt.NDArray[np.int32]  # [B]
    logprobs: npt.NDArray[np.float32]  # [B]
    ranks: npt.NDArray[np.int32]  # [B]
    top_token_ids: npt.NDArray[np.int32]  # [B, W]
    top_logprobs: npt.NDArray[np.float32]  # [B, W]
    num_kept: npt.NDArray[np.int32]  # [B], see `StepResult`


def packed_width(vocab_size: int) -> int:
    """Returns the number of int32 for each draw in what `pack_drawn` returns: 4 + 2 W."""
    return 4 + 2 * min(NUM_CANDIDATES, vocab_size)


def pack_drawn(
    logits_BV: jax.Array, token_ids_B: jax.Array, has_logprobs: jax.Array | bool, *, by_row: bool
) -> jax.Array:
    """Returns draws, and their log probabilities if any row asks, as int32 [B, 4 + 2 W]."""

    def with_logprobs() -> jax.Array:
        logprobs_B, ranks_B, ids_BW, top_BW = log_probabilities(
            logits_BV, token_ids_B, by_row=by_row
        )
        not_cut_B1 = jnp.zeros((logits_BV.shape[0], 1), jnp.int32)
        columns = (
            bits_of(logprobs_B[:, None]),
            ranks_B[:, None],
            not_cut_B1,
            ids_BW,
            bits_of(top_BW),
        )
        return jnp.concatenate(columns, axis=1)

    num_rows, vocab_size = logits_BV.shape
    logprobs = jax.lax.cond(
        has_logprobs,
        with_logprobs,
        lambda: jnp.zeros((num_rows, packed_width(vocab_size) - 1), jnp.int32),
    )
    return jnp.concatenate([token_ids_B[:, None], logprobs], axis=1)


def pack_draws(
    logits_RV: jax.Array,
    token_ids_R: jax.Array,
    inputs: StepInputs,
    processor_inputs: ProcessorInputs,
    *,
    by_row: bool,
    num_words: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns what `pack_drawn` does, and the tokens of each draw that were not cut off.

    Draws with `is_processed_R` have the log probabilities of the distributions that they are from.

    Args:
        logits_RV: The model's logits.
        token_ids_R: The drawn tokens.
        inputs: The metadata of the step.
        processor_inputs: The wide arrays of logits processors.
        by_row: Computes one row at a time.
        num_words: U, the words of the masks [R, U], in which each token that could be drawn has a
            bit; 0 for none.
    """
    num_rows = logits_RV.shape[0]
    raw_RX = pack_drawn(logits_RV, token_ids_R, inputs.flags[Flags.LOGPROBS] > 0, by_row=by_row)
    of_draws = {name: getattr(inputs, name) for name in inputs._fields if "_R" in name}
    rows = logits_RV, token_ids_R, of_draws, processor_inputs
    no_masks_RU = jnp.zeros((num_rows, num_words), jnp.uint32)

    def pack(rows: Any) -> tuple[jax.Array, jax.Array]:
        some_BV, ids_B, some, wide = rows
        scaled_BV = scale_logits(some_BV, inputs._replace(**some), wide, by_row=by_row)
        is_kept_BV = scaled_BV > -jnp.inf
        packed_BX = pack_drawn(scaled_BV, ids_B, True, by_row=by_row)
        packed_BX = packed_BX.at[:, _NUM_KEPT].set(jnp.sum(is_kept_BV, axis=1, dtype=jnp.int32))
        return packed_BX, _words_of(is_kept_BV)[:, :num_words]

    def pack_processed() -> tuple[jax.Array, jax.Array]:
        empty = jnp.zeros_like(raw_RX), no_masks_RU
        packed_RX, masks_RU = pack(rows) if by_row else in_parts(pack, rows, empty)
        return jnp.where(inputs.is_processed_R[:, None] > 0, packed_RX, raw_RX), masks_RU

    return jax.lax.cond(
        inputs.flags[Flags.PROCESSED] > 0, pack_processed, lambda: (raw_RX, no_masks_RU)
    )


def _words_of(is_set_BV: jax.Array) -> jax.Array:
    """Returns masks with a bit for each token; see `jaxpage/step/token_masks.py`."""
    num_rows, vocab_size = is_set_BV.shape
    padded_BV = jnp.pad(is_set_BV, ((0, 0), (0, -vocab_size % MASK_BITS)))
    bits_BUb = padded_BV.reshape(num_rows, -1, MASK_BITS).astype(jnp.uint32)
    return jnp.sum(bits_BUb << jnp.arange(MASK_BITS, dtype=jnp.uint32), axis=2, dtype=jnp.uint32)


def bits_of(values: jax.Array) -> jax.Array:
    """Returns float32 numbers as int32, to travel among integers."""
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def unpack_drawn(packed: npt.NDArray[np.int32], num_rows: int) -> Drawn:
    """Returns the first `num_rows` rows of one of a step's arrays, on the host."""
    rows = np.ascontiguousarray(packed[:num_rows])
    first = _NUM_KEPT + 1
    num_candidates = (rows.shape[1] - first) // 2
    floats = rows.view(np.float32)
    return Drawn(
        rows[:, 0],
        floats[:, 1],
        rows[:, 2],
        rows[:, first : first + num_candidates],
        floats[:, first + num_candidates :],
        rows[:, _NUM_KEPT],
    )
