"""What a figure comes to: numbers beside the paper's, tolerances, and the panels of its picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

# Quantiles of Student's distribution for intervals of 95 %, by degrees of freedom
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}


class Interval(NamedTuple):
    """A mean over seeds, and half of its interval of 95 % (Student). One seed has none."""

    mean: float
    half: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval:
        values = list(values)
        if len(values) < 2:
            return cls(values[0])
        return cls(fmean(values), STUDENT[len(values) - 1] * stdev(values) / math.sqrt(len(values)))

    def text(self, digits: int = 2, factor: float = 1.0) -> str:
        mean = f"{factor * self.mean:.{digits}f}"
        return f"{mean} ± {factor * self.half:.{digits}f}" if self.half else mean


class Row(NamedTuple):
    """A line of the table."""

    what: str
    paper: str
    ours: str


class Check(NamedTuple):
    """A number and where it must lie."""

    name: str
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        return self.low <= self.value <= self.high


@dataclass(frozen=True)
class Series:
    """Points of a line, or heights of bars with `errors` to both sides."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float] = ()
    is_paper: bool = False  # what the paper printed, drawn beside ours


@dataclass(frozen=True)
class Panel:
    """One pair of axes. bars: the names of the groups of bars along x, each with a bar per series; stacked: one bar, in parts."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    bars: Sequence[str] = ()
    stacked: bool = False
    log_x: bool = False
    log_y: bool = False
    y_limit: float | None = None


@dataclass(frozen=True)
class Figure:
    """One figure of the paper."""

    name: str  # its number
    title: str
    origin: str  # simulated, measured or computed
    rows: Sequence[Row]
    panels: Sequence[Panel] = ()
    checks: Sequence[Check] = ()
