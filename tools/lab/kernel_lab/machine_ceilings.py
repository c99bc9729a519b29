"""Measures the best that this GPU reaches in a large copy, a large sum and a large product.

The product is of two bfloat16 matrices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tools.lab.kernel_lab.bounds import Ceilings
from tools.lab.kernel_lab.timing import median_of_rounds

COPY_BYTES = 2**30
MATMUL_SIZE = 8192
NUM_COPIES = 20  # copies of a round; they queue up, so that their dispatch is hidden
NUM_MATMULS = 10


@jax.jit
def _copy(x: jax.Array) -> jax.Array:
    return x + 1


@jax.jit
def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, dtype=jnp.int32)


@jax.jit
def _matmuls(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, NUM_MATMULS, lambda _, y: jnp.dot(y, w), x)


def measure(
    *, copy_bytes: int = COPY_BYTES, matmul_size: int = MATMUL_SIZE, rounds: int = 7
) -> Ceilings:
    """Measures the ceilings.

    Args:
        copy_bytes: The bytes that a copy reads and writes, and that a sum reads.
        matmul_size: The rows and columns of the bfloat16 matrices; a product counts 2 n**3 FLOP.
        rounds: The rounds of which the median is taken.
    """
    x = jnp.arange(copy_bytes // 4, dtype=jnp.int32)

    def copies() -> jax.Array:
        for _ in range(NUM_COPIES):
            last = _copy(x)
        return last

    def sums() -> jax.Array:
        for _ in range(NUM_COPIES):
            last = _sum(x)
        return last

    copied = median_of_rounds(copies, NUM_COPIES, rounds=rounds)
    read = median_of_rounds(sums, NUM_COPIES, rounds=rounds)
    keys = jax.random.split(jax.random.key(0))
    shape = (matmul_size, matmul_size)
    y = jax.random.normal(keys[0], shape, jnp.bfloat16)
    w = jax.random.normal(keys[1], shape, jnp.bfloat16) * jnp.bfloat16(matmul_size**-0.5)
    matmul = median_of_rounds(lambda: _matmuls(y, w), NUM_MATMULS, rounds=rounds)
    return Ceilings(
        copied=2 * copy_bytes / copied.seconds,
        read=copy_bytes / read.seconds,
        matmul=2 * matmul_size**3 / matmul.seconds,
    )


def as_data(ceilings: Ceilings) -> dict[str, float]:
    """Returns the ceilings as plain data."""
    return dataclasses.asdict(ceilings)


def of_data(data: Mapping[str, Any]) -> Ceilings:
    """Returns the ceilings that `as_data` wrote; other entries are ignored."""
    return Ceilings(**{field.name: data[field.name] for field in dataclasses.fields(Ceilings)})
