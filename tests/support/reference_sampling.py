"""Says what a draw should be, by definition: float64, one logit after the other, with the noise of
its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxpage import SamplingParams
from tests.support.distributions import kept

Logits = npt.NDArray[np.float64]


def processed(
    logits: npt.NDArray[np.floating],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    eos: Iterable[int] = (),
    words: Iterable[Sequence[int]] = (),
) -> Logits:
    """Returns the logits to draw from, in vLLM's order: what is allowed, biases, penalties."""
    wide = logits.astype(np.float64)
    forbidden = {word[-1] for word in words if ends_with(output, word[:-1])}
    if len(output) < params.min_tokens:
        forbidden |= {*eos, *params.stop_token_ids}
    for token_id in range(len(wide)):
        if token_id in forbidden or token_id not in (params.allowed_token_ids or range(len(wide))):
            wide[token_id] = -np.inf
    for token_id, bias in params.logit_bias:
        wide[token_id] += bias
    for token_id in {*prompt, *output}:
        wide[token_id] *= (
            1 / params.repetition_penalty if wide[token_id] > 0 else params.repetition_penalty
        )
    for token_id in set(output):
        wide[token_id] -= (
            params.frequency_penalty * list(output).count(token_id) + params.presence_penalty
        )
    return wide


def ends_with(known: Sequence[int], end: Sequence[int]) -> bool:
    return len(known) >= len(end) and list(known[len(known) - len(end) :]) == list(end)


def drawn(
    logits: Logits, params: SamplingParams, seed: int, sample_index: int, position: int
) -> int:
    """Returns the token of processed logits: the first of the largest.

    There is noise unless the request is greedy.
    """
    if params.greedy:
        return int(logits.argmax())
    scaled = logits / params.temperature
    scaled = np.where(kept(scaled, params.top_k, params.top_p, params.min_p), scaled, -np.inf)
    words = jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
    return int(
        (
            scaled + np.asarray(jax.random.gumbel(key, logits.shape, jnp.float32), np.float64)
        ).argmax()
    )
