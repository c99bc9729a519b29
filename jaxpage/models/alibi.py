"""Computes the slopes of ALiBi (Press et al., 2021), and reads the sizes of models with it."""

from __future__ import annotations

from typing import Any

from jaxpage.layers.rope import NO_ROTATION
from jaxpage.models.fields import Fields


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Returns the slope of each query head, as the models with ALiBi were trained.

    Up to a power of two n, head i has `2 ** (-8 i / n)`, counted from 1. The heads after it have
    every second slope of a model with 2 n heads.
    """
    power = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8 * head / power) for head in range(1, power + 1)]
    odd_slopes = [2.0 ** (-4 * head / power) for head in range(1, 2 * (num_heads - power) + 1, 2)]
    return (*first, *odd_slopes)


def alibi_sizes(fields: Fields, longest: int) -> dict[str, Any]:
    """Returns the arguments of a spec with ALiBi in place of positions, and as many K/V heads as Q.

    The feed-forward width is four times that of the model.

    Args:
        fields: The fields of the config, with the usual names for width and heads.
        longest: The longest sequence of the config; ALiBi has no limit of its own.
    """
    num_heads = fields.integer("num_attention_heads")
    return {
        "num_kv_heads": num_heads,
        "head_dim": fields.divide("hidden_size", "num_attention_heads"),
        "max_position_embeddings": longest,
        "feed_forward_width": 4 * fields.integer("hidden_size"),
        "rope": (NO_ROTATION, longest),
        "alibi_slopes": alibi_slopes(num_heads),
    }
