"""Computes log probabilities of chosen tokens, their ranks, and the most likely tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpage.device.selection_kernels import SelectionKernels, kernels_in_use
from jaxpage.shapes import NUM_CANDIDATES

LogProbabilities = tuple[Float[Array, "B"], Int[Array, "B"], Int[Array, "B W"], Float[Array, "B W"]]


def log_probabilities(
    logits_BV: Float[Array, "B V"], token_ids_B: Int[Array, "B"], *, by_row: bool
) -> LogProbabilities:
    """Returns the log probability and rank of each chosen token, and the W most likely tokens.

    The probabilities are those of the softmax of these logits.
    """
    if by_row:
        alone = (logits_BV[:, None], token_ids_B[:, None])
        rows: LogProbabilities = jax.lax.map(lambda row: _log_probabilities(*row), alone)
        return jax.tree.map(lambda array: array[:, 0], rows)
    if (kernels := kernels_in_use()) is not None:
        return _select_log_probabilities(logits_BV, token_ids_B, kernels)
    return _log_probabilities(logits_BV, token_ids_B)


def log_softmax(logits_RV: Float[Array, "R V"]) -> Float[Array, "R V"]:
    """Returns the log probabilities of logits, whose sums have one order where a kernel has it."""
    kernels = kernels_in_use()
    if kernels is None or kernels.log_sums is None:
        return jax.nn.log_softmax(logits_RV)
    largest_R1 = jnp.max(logits_RV, axis=1, keepdims=True)
    return logits_RV - largest_R1 - kernels.log_sums(logits_RV, largest_R1[:, 0])[:, None]


def _select_log_probabilities(
    logits_BV: jax.Array, token_ids_B: jax.Array, kernels: SelectionKernels
) -> LogProbabilities:
    """Returns what `log_probabilities` returns, without an array as large as the logits."""
    largest_B1 = jnp.max(logits_BV, axis=1, keepdims=True)
    if kernels.log_sums is None:
        log_sum_B1 = jnp.log(jnp.sum(jnp.exp(logits_BV - largest_B1), axis=1, keepdims=True))
    else:
        log_sum_B1 = kernels.log_sums(logits_BV, largest_B1[:, 0])[:, None]
    # A negative id says that nothing was drawn; its log probability is not read.
    logit_B1 = jnp.take_along_axis(logits_BV, jnp.maximum(token_ids_B, 0)[:, None], axis=1)
    chosen_B1 = logit_B1 - largest_B1 - log_sum_B1
    # In the same operations as the token's own, so that rounding puts no equal token above it.
    ranks_B = 1 + jnp.sum(logits_BV - largest_B1 - log_sum_B1 > chosen_B1, axis=1, dtype=jnp.int32)
    count = min(NUM_CANDIDATES, logits_BV.shape[1])
    some_BW, some_ids_BW = kernels.top_candidates(
        logits_BV, largest_B1[:, 0], log_sum_B1[:, 0], count
    )
    top_BW, order_BW = jax.lax.top_k(some_BW, count)  # sorting so few takes one launch
    return chosen_B1[:, 0], ranks_B, jnp.take_along_axis(some_ids_BW, order_BW, axis=1), top_BW


@jax.jit
def _log_probabilities(logits_BV: jax.Array, token_ids_B: jax.Array) -> LogProbabilities:
    normalised_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    chosen_B1 = jnp.take_along_axis(normalised_BV, jnp.maximum(token_ids_B, 0)[:, None], axis=-1)
    ranks_B = 1 + jnp.sum(normalised_BV > chosen_B1, axis=-1, dtype=jnp.int32)
    top_BW, ids_BW = jax.lax.top_k(normalised_BV, min(NUM_CANDIDATES, logits_BV.shape[1]))
    return chosen_B1[:, 0], ranks_B, ids_BW.astype(jnp.int32), top_BW
