"""Chooses how much is run: seeds, windows of virtual time, rates and processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.lab.paper.pool import Pool
from tools.lab.paper.simulated_cases import PAGED

# Their requests are short, so that a shorter window has enough of them.
SHORT = {"alpaca", "translation"}
# The rates of a curve, as shares of the highest rate that it is expected to sustain.
SHARES = (0.4, 0.7, 0.9, 1.0, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0)
QUICK_SHARES = (0.6, 1.0, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0)


@dataclass(frozen=True)
class Effort:
    """Holds the extent of one call of the program."""

    pool: Pool
    quick: bool

    @property
    def seeds(self) -> Sequence[int]:
        """Returns the seeds of the traces."""
        return range(1 if self.quick else 3)

    @property
    def text(self) -> str:
        """Returns a text about the seeds and windows for readers."""
        seeds = (
            "One seed."
            if self.quick
            else "Three seeds; intervals are of 95 % (Student's, over the seeds)."
        )
        long, short = self.window("sharegpt"), self.window("alpaca")
        return (
            f"{seeds} Curves have {long:g} seconds of arrivals at most, those of the short requests of Alpaca and WMT16"
            f" {short:g} seconds. The paper has an hour, or a quarter of one: the shorter the window, the later an overload is seen."
            " Figures 2 and 13 have the hour."
        )

    @property
    def shares(self) -> Sequence[float]:
        """Returns the rates of a curve, as shares of the expected highest rate."""
        return QUICK_SHARES if self.quick else SHARES

    def window(self, dataset: str) -> float:
        """Returns the seconds of arrivals for curves."""
        seconds, short = (600.0, 50.0) if self.quick else (1200.0, 150.0)
        return short if dataset in SHORT else seconds

    def memory_window(self, dataset: str, system: str) -> float:
        """Returns the seconds of arrivals for means over time.

        Systems that reserve have few requests at once, whose lengths average out slowly. The
        engine's pool is as full after a few minutes.
        """
        if dataset in SHORT:
            return 200.0 if self.quick else 900.0
        return 900.0 if self.quick and system == PAGED else 3600.0
