"""Measures how XLA multiplies by weights on this CPU: with which library, and whether bfloat16 is faster than float32.

That depends on the processor and on the version of JAX: on one with AVX512_BF16 jax 0.12 takes a third to a half of float32's time
in bfloat16, and jax 0.10.2 takes longer (docs/lab-log.md). So it is measured, once, and remembered in the user's cache.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpage.layers.product import product
from jaxpage.user_cache import user_cache

logger = logging.getLogger(__name__)

INNER, OUTER = 768, 4096  # of a weight that does not fit into the caches next to a core
NUM_ROWS = (2, 32)  # a few sequences that decode, and many
REPEATS, ROUNDS = 5, 15
# by what compiled code calls
_LIBRARIES = {"__ynn": "YNNPACK", "onednn": "oneDNN", "__xnn": "XNNPACK"}


@dataclass(frozen=True)
class CPUProducts:
    """The result of the measurement.

    library: the library that takes a float32 product of a few rows; "" where XLA's own code does.
    seconds: the time of a product with each of NUM_ROWS, by dtype.
    """

    library: str
    seconds: dict[str, list[float]]

    @property
    def time_of_bfloat16(self) -> list[float]:
        """Returns the time of bfloat16 as a multiple of float32's, for each of NUM_ROWS."""
        return [
            ours / theirs
            for ours, theirs in zip(self.seconds["bfloat16"], self.seconds["float32"], strict=True)
        ]

    @property
    def prefer_bfloat16(self) -> bool:
        """Returns whether bfloat16 is faster at every number of rows."""
        return all(ratio < 1 for ratio in self.time_of_bfloat16)

    def described(self) -> str:
        times = (
            f"{rows} rows {' / '.join(f'{self.gflops(dtype, index):.0f}' for dtype in ('float32', 'bfloat16'))}"
            for index, rows in enumerate(NUM_ROWS)
        )
        return f"{self.library or 'plain XLA'}; GFLOP/s in float32 / bfloat16: {', '.join(times)}"

    def gflops(self, dtype: str, index: int) -> float:
        return 2e-9 * NUM_ROWS[index] * INNER * OUTER / self.seconds[dtype][index]


@functools.cache
def cpu_products() -> CPUProducts:
    """Measured, which takes a second, or remembered."""
    products = remembered().get(_conditions())
    if products is None:
        products = _measure()
        remember(products)
    return products


def remembered() -> dict[str, CPUProducts]:
    """Returns what was measured before, by its conditions; nothing where the file is not there or not ours."""
    try:
        known = {
            key: CPUProducts(**value) for key, value in json.loads(_file().read_text()).items()
        }
        for products in known.values():
            products.described()
            if not all(
                0 < time < math.inf for times in products.seconds.values() for time in times
            ):
                return {}
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        IndexError,
        ZeroDivisionError,
        RecursionError,
    ):
        return {}
    return known


def remember(products: CPUProducts) -> None:
    """Keeps what was measured, for this processor, this version of JAX and these flags of XLA."""
    known = {**remembered(), _conditions(): products}
    path = _file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(
            json.dumps({key: asdict(value) for key, value in known.items()}, indent=1)
        )
        temporary.replace(path)
    except OSError as error:  # measured again at the next start
        logger.debug("cannot write %s: %s", path, error)


def _file() -> Path:
    return user_cache() / "cpu-products.json"


def _conditions() -> str:
    digest = hashlib.sha256(repr(processor_lines()).encode()).hexdigest()[:16]
    return f"{jax.__version__}, {processor()}, {digest}, {os.cpu_count()} cores, {os.environ.get('XLA_FLAGS', '')}"


def _measure() -> CPUProducts:
    """The types take turns, so that other programs slow all of them alike."""
    runs: list[Callable[[], Any]] = []
    library = ""
    for dtype in ("float32", "bfloat16"):
        weight = jnp.ones((OUTER, INNER), dtype)
        for rows in NUM_ROWS:
            x = jnp.ones((rows, INNER), dtype)
            compiled = jax.jit(product).lower(x, weight).compile()
            if dtype == "float32" and not library:
                code = compiled.as_text() or ""
                library = next((name for call, name in _LIBRARIES.items() if call in code), "")
            runs.append(functools.partial(compiled, x, weight))
    rounds = [[fastest(run, 1) for run in runs] for _ in range(ROUNDS)]
    best = [min(times) for times in zip(*rounds, strict=True)]
    return CPUProducts(
        library, {"float32": best[: len(NUM_ROWS)], "bfloat16": best[len(NUM_ROWS) :]}
    )


def fastest(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Seconds of the fastest of some calls, the device's work included; the first, which may pay for more, does not count."""
    jax.block_until_ready(run())
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - started)
    return min(found)


def processor_lines() -> list[str]:
    """Its name and what it can do, as Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})


def processor() -> str:
    """Its name; "" where Linux has none."""
    return next(
        (
            line.partition(":")[2].strip()
            for line in processor_lines()
            if line.startswith("model name")
        ),
        "",
    )
