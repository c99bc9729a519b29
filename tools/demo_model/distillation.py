"""What drafters learn from: the demo model's own distribution of every next token (Hinton et al. 2015, arXiv:1503.02531)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tools.demo_model.model import ModelSpec, Params, residual_streams, rms_norm

# of a guess one place further on, in the loss: it is of use only where the one before it is right
LATER_WEIGHT = 0.8

# by which a head's first table is smaller than the target's: what it knows is another token, and
# being sure of it costs steps
UNSURE = 0.4


class Seen(NamedTuple):
    """A model's view of windows of tokens."""

    # what enters layer 0, 1 and so on, and what leaves the last one: [B, T, D]
    streams: list[jax.Array]
    hidden_BTD: jax.Array  # the last of these behind the final norm
    logits_BTV: jax.Array  # at place t: of token t + 1


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model that does not change."""

    spec: ModelSpec
    params: Params

    def __call__(self, tokens_BT: jax.Array) -> Seen:
        """What it makes of each place."""
        streams = residual_streams(self.spec, self.params, tokens_BT)
        hidden_BTD = rms_norm(streams[-1], self.params["norm"], self.spec.norm_epsilon)
        return Seen(streams, hidden_BTD, hidden_BTD @ self.params["embed"].T)


def soft_cross_entropy(p_BTV: jax.Array, logits_BTV: jax.Array) -> jax.Array:
    """-sum(p log q) of each place [B, T]. p may be a part of a distribution: then the place counts as much as its part."""
    mass_BT = p_BTV.sum(-1)
    return mass_BT * jax.nn.logsumexp(logits_BTV, -1) - (p_BTV * logits_BTV).sum(-1)


def discounted(losses: list[jax.Array]) -> jax.Array:
    """The mean of the losses of guesses one, two and more places on, each counting for less than the one before it."""
    weights = LATER_WEIGHT ** np.arange(len(losses))
    return jnp.dot(jnp.stack(losses), weights / weights.sum())


def frequent_tokens(text: np.ndarray, vocabulary: int, most: int) -> np.ndarray:
    """The token ids that the text has most often, in the order of the ids."""
    counts = np.bincount(text.ravel(), minlength=vocabulary)
    return np.sort(np.argsort(-counts, kind="stable")[:most]).astype(np.int64)
