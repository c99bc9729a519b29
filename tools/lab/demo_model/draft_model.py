"""Makes a draft model: a small Llama with the vocabulary of its target.

Leviathan et al. 2023, arXiv:2211.17192.
"""

import dataclasses

import jax

from tools.lab.demo_model.distillation import Teacher, soft_cross_entropy
from tools.lab.demo_model.model import ModelSpec, Params, init_params, last_hidden_states
from tools.lab.demo_model.training import Objective


def draft_spec(target: ModelSpec) -> ModelSpec:
    """Returns the sizes: half as wide, two layers, keys and values shaped like the demo model's."""
    return dataclasses.replace(
        target,
        width=target.width // 2,
        layers=2,
        heads=2,
        kv_heads=2,
        feed_forward=target.width * 11 // 8,
    )


def first_params(teacher: Teacher, seed: int) -> Params:
    """Returns random weights."""
    return init_params(draft_spec(teacher.spec), jax.random.key(seed))


def logits(teacher: Teacher, params: Params, tokens_BT: jax.Array) -> jax.Array:
    """Returns the logits of the token after each token."""
    return last_hidden_states(draft_spec(teacher.spec), params, tokens_BT) @ params["embed"].T


def objective(teacher: Teacher) -> Objective:
    """Returns the loss: soft cross entropy with the target's distribution at every position."""

    def loss(params: Params, window_BT: jax.Array) -> jax.Array:
        p_BTV = jax.nn.softmax(teacher(window_BT).logits_BTV, -1)
        return soft_cross_entropy(p_BTV, logits(teacher, params, window_BT)).mean()

    return loss
