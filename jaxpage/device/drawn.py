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


def width_of_draw(vocab_size: int) -> int:
    """Returns the number of int32 for each draw in what `pack_drawn` returns: 4 + 2 W."""
    return 4 + 2 * min(NUM_CANDIDATES, vocab_size)


def pack_drawn(
    logits_BV: jax.Array, token_ids_B: jax.Array, has_logprobs: jax.Array | bool, *, by_row: bool
) -> jax.Array:
    """Returns draws, and their log probabilities if any row asks, as int32 [B, 4 + 2 W]."""
    num_rows, vocab_size = logits_BV.shape
    no_cuts_B = jnp.zeros(num_rows, jnp.int32)
    logprobs = jax.lax.cond(
        has_logprobs,
        lambda: _pack_logprobs(logits_BV, token_ids_B, no_cuts_B, by_row=by_row),
        lambda: jnp.zeros((num_rows, width_of_draw(vocab_size) - 1), jnp.int32),
    )
    return jnp.concatenate([token_ids_B[:, None], logprobs], axis=1)


def _pack_logprobs(
    logits_BV: jax.Array, token_ids_B: jax.Array, num_kept_B: jax.Array, *, by_row: bool
) -> jax.Array:
    """Returns the columns that follow the tokens in what `pack_drawn` returns."""
    logprobs_B, ranks_B, ids_BW, top_BW = log_probabilities(logits_BV, token_ids_B, by_row=by_row)
    columns = (
        bits_of(logprobs_B[:, None]),
        ranks_B[:, None],
        num_kept_B[:, None],
        ids_BW,
        bits_of(top_BW),
    )
    return jnp.concatenate(columns, axis=1)


def pack_draws(
    logits_RV: jax.Array,
    token_ids_R: jax.Array,
    inputs: StepInputs,
    processor_inputs: ProcessorInputs,
    *,
    scaled_RV: jax.Array | None,
    num_words: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns what `pack_drawn` does, and the tokens of each draw that were not cut off.

    Draws with `is_processed_R` have the log probabilities of the distributions that they are from.

    Args:
        logits_RV: The model's logits.
        token_ids_R: The drawn tokens.
        inputs: The metadata of the step.
        processor_inputs: The wide arrays of logits processors.
        scaled_RV: What `scale_logits` returns, where one row is computed at a time; else None.
        num_words: U, the words of the masks [R, U], in which each token that could be drawn has a
            bit; 0 for none.
    """
    if scaled_RV is None:
        return _pack_in_parts(logits_RV, token_ids_R, inputs, processor_inputs, num_words)
    is_processed_R = inputs.draws.is_processed_R > 0
    num_rows, vocab_size = logits_RV.shape

    def pack() -> tuple[jax.Array, jax.Array]:
        num_kept_R, masks_RU = _count_kept(scaled_RV, num_words)
        of_RV = jnp.where(is_processed_R[:, None], scaled_RV, logits_RV)
        num_kept_R = jnp.where(is_processed_R, num_kept_R, 0)
        return _pack_logprobs(of_RV, token_ids_R, num_kept_R, by_row=True), masks_RU

    def pack_nothing() -> tuple[jax.Array, jax.Array]:
        width = width_of_draw(vocab_size) - 1
        return jnp.zeros((num_rows, width), jnp.int32), jnp.zeros((num_rows, num_words), jnp.uint32)

    has_any = inputs.flags[Flags.LOGPROBS] + inputs.flags[Flags.PROCESSED] > 0
    logprobs, masks_RU = jax.lax.cond(has_any, pack, pack_nothing)
    return jnp.concatenate([token_ids_R[:, None], logprobs], axis=1), masks_RU


def _pack_in_parts(
    logits_RV: jax.Array,
    token_ids_R: jax.Array,
    inputs: StepInputs,
    processor_inputs: ProcessorInputs,
    num_words: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns what `pack_draws` returns, without a second array as large as the logits."""
    raw_RX = pack_drawn(logits_RV, token_ids_R, inputs.flags[Flags.LOGPROBS] > 0, by_row=False)
    rows = logits_RV, token_ids_R, inputs.draws, processor_inputs
    no_masks_RU = jnp.zeros((logits_RV.shape[0], num_words), jnp.uint32)

    def pack(rows: Any) -> tuple[jax.Array, jax.Array]:
        some_BV, ids_B, draws, wide = rows
        scaled_BV = scale_logits(some_BV, inputs._replace(draws=draws), wide, by_row=False)
        num_kept_B, masks_BU = _count_kept(scaled_BV, num_words)
        logprobs = _pack_logprobs(scaled_BV, ids_B, num_kept_B, by_row=False)
        return jnp.concatenate([ids_B[:, None], logprobs], axis=1), masks_BU

    def pack_processed() -> tuple[jax.Array, jax.Array]:
        packed_RX, masks_RU = in_parts(pack, rows, (jnp.zeros_like(raw_RX), no_masks_RU))
        return jnp.where(inputs.draws.is_processed_R[:, None] > 0, packed_RX, raw_RX), masks_RU

    return jax.lax.cond(
        inputs.flags[Flags.PROCESSED] > 0, pack_processed, lambda: (raw_RX, no_masks_RU)
    )


def _count_kept(scaled_BV: jax.Array, num_words: int) -> tuple[jax.Array, jax.Array]:
    """Returns the number of tokens that are not cut off, and masks of them."""
    is_kept_BV = scaled_BV > -jnp.inf
    num_kept_B = jnp.sum(is_kept_BV, axis=1, dtype=jnp.int32)
    return num_kept_B, _words_of(is_kept_BV)[:, :num_words]


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
    # A view as float32 needs rows without gaps.
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
