"""Computes the slopes of ALiBi (Press et al., 2021), and reads the sizes of models with it."""

from __future__ import annotations

from typing import Any

from jaxpage.layers.rope import NO_ROTATION
from jaxpage.models.config.fields import Fields
from jaxpage.models.parts.decoder_config import read_common


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Returns the slope of each query head, as the models with ALiBi were trained.

    Up to a power of two n, head i has `2 ** (-8 i / n)`, counted from 1. The heads after it have
    every second slope of a model with 2 n heads.
    """
    power = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8 * head / power) for head in range(1, power + 1)]
    odd_slopes = [2.0 ** (-4 * head / power) for head in range(1, 2 * (num_heads - power) + 1, 2)]
    return (*first, *odd_slopes)


def read_without_positions(fields: Fields, max_length: int, **options: Any) -> dict[str, Any]:
    """Returns what `read_common` does for a model with ALiBi and as many K/V heads as queries.

    The feed-forward width is four times that of the model, and the tables are tied by default.

    Args:
        fields: The fields of the config, with the usual names for width and heads.
        max_length: The longest sequence of the config; ALiBi has no limit of its own.
        **options: Further arguments of `read_common`.
    """
    return read_common(
        fields,
        num_kv_heads=fields.integer("num_attention_heads"),
        head_dim=fields.divide("hidden_size", "num_attention_heads"),
        max_position_embeddings=max_length,
        intermediate_size=4 * fields.integer("hidden_size"),
        rope=(NO_ROTATION, max_length),
        epsilon=("layer_norm_epsilon", 1e-5),
        tied=True,
        **options,
    )
