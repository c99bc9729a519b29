"""Histograms with fixed bounds, as Prometheus has them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

# 1, 2, 5, 10, ...: from a tenth of a millisecond, a step of a small model, to longer than anybody waits; and to a million tokens.
SECONDS = (*(mantissa * 10.0**power for power in range(-4, 3) for mantissa in (1, 2, 5)), 1000.0)
TOKENS = (*(mantissa * 10.0**power for power in range(6) for mantissa in (1, 2, 5)), 1e6)


class Histogram:
    """How many values lie at or below each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]):
        self._bounds = tuple(float(f"{bound:g}") for bound in bounds)  # 0.0002, not 0.00020000000000000001
        self._counts = [0] * (len(bounds) + 1)  # the last: above every bound
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> dict[str, Any]:
        """`buckets`: counts of the values up to and including each bound, keyed by the bound as Prometheus writes it; `sum`; `count`."""
        total, buckets = 0, {}
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets[bound] = total
        return {"buckets": buckets, "sum": self._sum, "count": total}
