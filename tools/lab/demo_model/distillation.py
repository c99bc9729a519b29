"""Gives drafters their target: the demo model's own distribution of every next token.

Hinton et al. 2015, arXiv:1503.02531.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tools.lab.demo_model.model import ModelSpec, Params, residual_streams, rms_norm

# The weight in the loss of a guess one place further on: it is useful only if the guess before it
# is right.
LATER_WEIGHT = 0.8

# A head's first table is the target's times this: the table gives the next token and not the head's
# later one, and a sure wrong guess costs steps to unlearn.
UNSURE = 0.4


class Seen(NamedTuple):
    """Holds a model's view of windows of tokens."""

    # The inputs of all layers in order, and the output of the last one: [B, T, D].
    streams: list[jax.Array]
    hidden_BTD: jax.Array  # the last stream after the final norm
    logits_BTV: jax.Array  # at position t, the logits of token t + 1


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model that does not change."""

    spec: ModelSpec
    params: Params

    def __call__(self, tokens_BT: jax.Array) -> Seen:
        """Returns the model's view of the tokens."""
        streams = residual_streams(self.spec, self.params, tokens_BT)
        hidden_BTD = rms_norm(streams[-1], self.params["norm"], self.spec.norm_epsilon)
        return Seen(streams, hidden_BTD, hidden_BTD @ self.params["embed"].T)


def soft_cross_entropy(p_BTV: jax.Array, logits_BTV: jax.Array) -> jax.Array:
    """Returns -sum(p log q) for each position [B, T].

    p may be a part of a distribution; then the position counts as much as that part.
    """
    mass_BT = p_BTV.sum(-1)
    return mass_BT * jax.nn.logsumexp(logits_BTV, -1) - (p_BTV * logits_BTV).sum(-1)


def discount(losses: list[jax.Array]) -> jax.Array:
    """Returns the mean loss of guesses one, two and more positions ahead.

    Each counts less than the one before it.
    """
    weights = LATER_WEIGHT ** np.arange(len(losses))
    return jnp.dot(jnp.stack(losses), weights / weights.sum())


def frequent_tokens(text: np.ndarray, vocabulary: int, maximum: int) -> np.ndarray:
    """Returns the most frequent token ids of the text, in the order of the ids."""
    counts = np.bincount(text.ravel(), minlength=vocabulary)
    return np.sort(np.argsort(-counts, kind="stable")[:maximum]).astype(np.int64)
