"""Computes losses and samples of a language model, for the progress report and the card."""

import jax
import numpy as np

from tools.lab.demo_model.model import ModelSpec, Params, last_hidden_states, token_losses
from tools.lab.demo_model.tokenizer import END_OF_TEXT_ID


def mean_loss(
    spec: ModelSpec, params: Params, stream: np.ndarray, max_tokens: int | None = None
) -> float:
    """Returns nats per token over consecutive full-length windows, 8 rows at a time."""
    evaluate = jax.jit(lambda p, w: token_losses(spec, p, w[:, :-1], w[:, 1:]))
    length = spec.max_positions
    windows = max(8, (len(stream) - 1) // length // 8 * 8)
    if max_tokens is not None:
        windows = min(windows, max(8, max_tokens // length // 8 * 8))
    index = np.arange(windows)[:, None] * length + np.arange(length + 1)
    rows = stream[index].astype(np.int32).reshape(-1, 8, length + 1)
    return float(np.mean([evaluate(params, batch) for batch in rows]))


def sample_text(
    spec: ModelSpec, params: Params, prompt: list[int], tokens: int, temperature: float, seed: int
) -> list[int]:
    """Continues a prompt; recomputes the whole window in each step.

    This is slow, but simple and independent of jaxpage.
    """
    width = spec.max_positions // 2
    forward = jax.jit(lambda p, ids, last: last_hidden_states(spec, p, ids)[0, last] @ p["embed"].T)
    rng, ids = np.random.default_rng(seed), list(prompt)
    for _ in range(min(tokens, width - len(prompt))):
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(ids)] = ids
        logits = np.asarray(forward(params, padded, len(ids) - 1), np.float64) / temperature
        weights = np.exp(logits - logits.max())
        ids.append(int(rng.choice(len(weights), p=weights / weights.sum())))
        if ids[-1] == END_OF_TEXT_ID:
            break
    return ids
