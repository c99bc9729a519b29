"""Measures what the machine can do: bytes read from memory and arithmetic per second."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.device import make_packed_matmul
from jaxpage.layers.matmul import matmul

WIDTH = 4096  # the width of the arrays that are read
REPEATS = 7
MATMUL_ROWS = 512  # enough that a product is not limited by reading the weights
MATMUL_WIDTHS = (1024, 2048, 4096)  # of weights that a cache holds, and of one that it does not


def bandwidth(num_bytes: int) -> float:
    """Returns the bytes per second of reading `num_bytes` again and again.

    An array that fits into a cache is read faster. The result is the best of what XLA does (a
    product of one or two rows, a sum) and, on a CPU, of NumPy with one thread for each core.
    """
    rows = max(1, num_bytes // (4 * WIDTH))
    array = jnp.ones((rows, WIDTH), jnp.float32)
    runs = [_compile(lambda x: jnp.sum(x, axis=1), array)]
    runs += [_compile(matmul, jnp.ones((few, WIDTH), jnp.float32), array) for few in (1, 2)]
    if jax.default_backend() != "cpu":
        return 4.0 * rows * WIDTH / min(fastest(run, REPEATS) for run in runs)
    num_cores = os.cpu_count() or 1
    parts = np.array_split(np.asarray(array), num_cores)
    vector = np.ones(WIDTH, np.float32)
    with ThreadPoolExecutor(num_cores) as pool:
        # NumPy releases the GIL in a product, so that the threads read at the same time.
        runs.append(lambda: list(pool.map(lambda part: part @ vector, parts)))
        return 4.0 * rows * WIDTH / min(fastest(run, REPEATS) for run in runs)


def matmul_rate(dtype: str) -> float:
    """Returns the operations per second of products in this type, in the best of several widths.

    A multiplication with its addition counts as two operations.
    """
    return max(_rate_at(width, dtype) for width in MATMUL_WIDTHS)


def _rate_at(width: int, dtype: str) -> float:
    x = jnp.ones((MATMUL_ROWS, width), dtype)
    weight = jnp.ones((width, width), dtype)
    if (multiply := make_packed_matmul(weight)) is None:
        run = _compile(matmul, x, weight)
    else:
        run = _compile(multiply, x)
    return 2.0 * MATMUL_ROWS * width * width / fastest(run, REPEATS)


def fastest(run: Callable[[], Any], repeats: int) -> float:
    """Returns the seconds of the fastest of some calls, the device's work included.

    One call before them does not count, because the first call may have more to do.
    """
    jax.block_until_ready(run())  # type: ignore[no-untyped-call]
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())  # type: ignore[no-untyped-call]
        rates.append(time.perf_counter() - started)
    return min(rates)


def _compile(function: Callable[..., Any], *arrays: jax.Array) -> Callable[[], Any]:
    return functools.partial(jax.jit(function).lower(*arrays).compile(), *arrays)
