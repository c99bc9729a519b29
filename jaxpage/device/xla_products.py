"""Measures how XLA multiplies by weights on this CPU.

The measurement says which library XLA uses, and whether bfloat16 is faster than float32. That
depends on the processor and on the version of JAX: on a processor with AVX512_BF16 jax 0.12 takes a
third to a half of float32's time in bfloat16, and jax 0.10.2 takes longer (docs/lab-log.md). So it
is measured once, and remembered in the user's cache.
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

# The sizes of a weight that does not fit into the caches next to a core.
INNER = 768
OUTER = 4096
NUM_ROWS = (2, 32)  # a few sequences that decode, and many
REPEATS = 5
ROUNDS = 15
# The key is in the names of the functions that compiled code calls.
_LIBRARIES = {"__ynn": "YNNPACK", "onednn": "oneDNN", "__xnn": "XNNPACK"}


@dataclass(frozen=True)
class CPUProducts:
    """Holds the result of the measurement.

    Attributes:
        library: The library that takes a float32 product of a few rows; "" where XLA's own code
            does.
        seconds: The time of a product with each of NUM_ROWS; the key is the dtype.
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

    def compared(self) -> str:
        """Returns how long bfloat16 takes, in a sentence."""
        times = ", ".join(f"{ratio:.1f}" for ratio in self.time_of_bfloat16)
        rows = " and ".join(map(str, NUM_ROWS))
        return (
            f"bfloat16 matrix products take {times} times as long as float32 ones here, "
            f"for {rows} rows"
        )

    def described(self) -> str:
        """Returns the library and the speeds in a line of text."""
        times = (
            f"{rows} rows {' / '.join(f'{self.gflops(dtype, index):.0f}' for dtype in ('float32', 'bfloat16'))}"
            for index, rows in enumerate(NUM_ROWS)
        )
        return f"{self.library or 'plain XLA'}; GFLOP/s in float32 / bfloat16: {', '.join(times)}"

    def gflops(self, dtype: str, index: int) -> float:
        """Returns the speed of a product, in GFLOP/s."""
        return 2e-9 * NUM_ROWS[index] * INNER * OUTER / self.seconds[dtype][index]


@functools.cache
def cpu_products() -> CPUProducts:
    """Returns the measurement: the remembered one, or a new one, which takes a second."""
    products = remembered().get(_conditions())
    if products is None:
        products = _measure()
        remember(products)
    return products


def remembered() -> dict[str, CPUProducts]:
    """Returns the earlier measurements by their conditions; nothing if the file is not valid."""
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
    """Keeps a measurement for this processor, this version of JAX, and these flags of XLA."""
    known = {**remembered(), _conditions(): products}
    path = _file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(
            json.dumps({key: asdict(value) for key, value in known.items()}, indent=1)
        )
        temporary.replace(path)
    except OSError as error:  # it is measured again at the next start
        logger.debug("cannot write %s: %s", path, error)


def _file() -> Path:
    return user_cache() / "cpu-products.json"


def _conditions() -> str:
    digest = hashlib.sha256(repr(processor_lines()).encode()).hexdigest()[:16]
    return f"{jax.__version__}, {processor()}, {digest}, {os.cpu_count()} cores, {os.environ.get('XLA_FLAGS', '')}"


def _measure() -> CPUProducts:
    """Measures products in both types.

    The types take turns, so that other programs slow both alike.
    """
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
    """Returns the seconds of the fastest of some calls, the device's work included.

    One call before them does not count, because the first call may have more to do.
    """
    jax.block_until_ready(run())
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - started)
    return min(found)


def processor_lines() -> list[str]:
    """Returns the processor's name and its features, as Linux lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})


def processor() -> str:
    """Returns the processor's name; "" where Linux has none."""
    return next(
        (
            line.partition(":")[2].strip()
            for line in processor_lines()
            if line.startswith("model name")
        ),
        "",
    )
