"""Computes the slopes of ALiBi (Press et al., 2021)."""

from __future__ import annotations


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Returns the slope of each query head, as the models with ALiBi were trained.

    Up to a power of two n, head i has `2 ** (-8 i / n)`, counted from 1. The heads after it have
    every second slope of a model with 2 n heads.
    """
    power = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8 * head / power) for head in range(1, power + 1)]
    odd_slopes = [2.0 ** (-4 * head / power) for head in range(1, 2 * (num_heads - power) + 1, 2)]
    return (*first, *odd_slopes)
