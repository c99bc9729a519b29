"""Holds the results of a figure: numbers with the paper's, tolerances, and panels of a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

# Quantiles of Student's distribution for intervals of 95 %, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}


class Interval(NamedTuple):
    """A mean over seeds, and half of its interval of 95 % (Student); one seed has no interval."""

    mean: float
    half: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval:
        """Returns the interval of these values."""
        values = list(values)
        if len(values) < 2:
            return cls(values[0])
        return cls(fmean(values), STUDENT[len(values) - 1] * stdev(values) / math.sqrt(len(values)))

    def text(self, digits: int = 2, factor: float = 1.0) -> str:
        """Returns the mean, with the half where there is one."""
        mean = f"{factor * self.mean:.{digits}f}"
        return f"{mean} ± {factor * self.half:.{digits}f}" if self.half else mean


class Row(NamedTuple):
    """A line of the table."""

    what: str
    paper: str
    ours: str


class Check(NamedTuple):
    """A number and the range in which it must lie."""

    name: str
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """Returns whether the number lies in the range."""
        return self.low <= self.value <= self.high


@dataclass(frozen=True)
class Series:
    """The points of a line, or the heights of bars with `errors` to both sides."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float] = ()
    is_paper: bool = False  # True for the paper's numbers, which are drawn with ours


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: The title.
        x_label: The label of the x axis.
        y_label: The label of the y axis.
        series: The lines or bars.
        bars: The names of the groups of bars along x, each with a bar per series; empty for lines.
        stacked: Each group is one bar, in parts.
        log_x: The x axis is logarithmic.
        log_y: The y axis is logarithmic.
        y_limit: The end of the y axis; None for an automatic one.
    """

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
