"""Draws the figures of the PagedAttention paper with this project's own parts.

    python tools/reproduce_paper.py --quick --out /tmp/paper
    python tools/reproduce_paper.py --docs

The parts are the scheduler, the block manager and the kernels. Needs `pip install 'jaxpage[plot]'`.
A line for each figure goes to standard error; status 1 means that a tolerance fails.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

# Lets the program run where only jaxpage is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pallas_kernels import paged_attention
from tools.lab.paper.block_sizes import AttentionTime
from tools.lab.paper.main import main

NUM_HEADS, HEAD_DIM, BLOCK_SIZE = 40, 128, 16  # shapes of OPT-13B, in float32
ROUNDS = 15


def measure_attention(contexts: Sequence[int], nums_rows: Sequence[int]) -> list[AttentionTime]:
    """Times this project's kernel over paged and over contiguous keys and values.

    The paged blocks are in any order; a single block as long as the context is contiguous.
    """
    backend = "cpu" if jax.default_backend() == "cpu" else "auto"
    times = []
    for num_rows in nums_rows:
        for context in contexts:
            paged, contiguous = _microseconds(num_rows, context, (BLOCK_SIZE, context), backend)
            times.append(AttentionTime(context, num_rows, paged, contiguous))
    return times


def _microseconds(
    num_rows: int, context: int, block_sizes: Sequence[int], backend: str
) -> list[float]:
    """Returns the medians of rounds in which the block sizes take turns."""
    calls = []
    for block_size in block_sizes:
        num_blocks = context // block_size
        random = np.random.default_rng(0)
        shape = (1 + num_rows * num_blocks, block_size, NUM_HEADS, HEAD_DIM)
        k, v = (jnp.asarray(random.standard_normal(shape, np.float32)) for _ in range(2))
        q = jnp.asarray(random.standard_normal((num_rows, NUM_HEADS, HEAD_DIM), np.float32))
        table = 1 + random.permutation(num_rows * num_blocks).reshape(num_rows, num_blocks).astype(
            np.int32
        )
        lengths = jnp.full(num_rows, context, jnp.int32)
        starts = jnp.arange(num_rows + 1, dtype=jnp.int32)
        function = jax.jit(
            lambda *arrays: paged_attention(
                *arrays, scale=HEAD_DIM**-0.5, backend=backend, max_query_len=1
            )
        )
        calls.append((function, (q, k, v, jnp.asarray(table), lengths, starts)))
        jax.block_until_ready(function(*calls[-1][1]))
    rounds = [[_time(function, arrays) for function, arrays in calls] for _ in range(ROUNDS)]
    return [1e6 * statistics.median(times) for times in zip(*rounds, strict=True)]


def _time(function: object, arrays: tuple[jax.Array, ...]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(function(*arrays))  # type: ignore[operator]
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main(measure_attention=measure_attention))
