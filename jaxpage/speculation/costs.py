"""How long steps take, by their shape and by what a drafter on the device does in them. It has no clock; it counts measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass

Shape = tuple[int, int]  # rows, query tokens in all; of a step without drafts they are as many

# Standard deviations of logarithms, so that 0.1 is about a tenth.
NOISE = 0.1  # of one step
PACE = 0.5  # how far the first steps may be from those at the start, which had no work for the host and all they read in caches
SHAPE = 0.2  # how far what was measured of a shape at the start may be from what it takes beside the others
AHEAD = 0.5  # the same of drafting ahead, which is a difference of two such measurements
PACE_DRIFT, SHAPE_DRIFT, AHEAD_DRIFT = 0.01, 0.005, 0.01  # how far each may move from one measurement to the next
# A measurement that differs by more than these counts as if it differed by so much: a factor, and standard deviations of what is expected.
MOST_SURPRISING, MOST_DEVIATIONS = 1.25, 2.5
LEAST = 1e-9  # seconds: what a clock may not see has a logarithm too


@dataclass
class _Factor:
    """By how much something takes longer than was measured of it at first, and the variance of its logarithm."""

    variance: float
    most: float  # of the variance
    value: float = 1.0

    def learn(self, surprise: float, gain: float, share: float) -> None:
        self.value *= math.exp(gain * surprise)
        self.variance *= 1.0 - gain * share

    def drift(self, deviation: float, num_measurements: int = 1) -> None:
        self.variance = min(self.most, self.variance + num_measurements * deviation**2)


def _factor(deviation: float) -> _Factor:
    return _Factor(deviation**2, deviation**2)


class AheadCosts:
    """Seconds that a drafter on the device takes in steps of each shape, as measured at the start."""

    def __init__(self, most_levels: int, *, each_level: bool) -> None:
        """
        Args:
            most_levels: tokens ahead that it drafts, however many drafts it makes.
            each_level: each of them takes time of its own; else it drafts all at once or none.
        """
        self.farthest = most_levels if each_level else 1  # level that takes time of its own
        self._at_start: dict[Shape, tuple[float, float, float]] = {}  # to follow, the first level, each further one
        self.prompt_token = 0.0  # following a token of a prompt

    def at_start(self, shape: Shape, following: float, first: float, farthest: float) -> None:
        """A step of this shape took so much longer with a drafter that follows, that drafts one token ahead as well, and as far as it can.

        The first level may take less than the others: a head has made something of the token that was drawn before it drafts.
        """
        each = max(0.0, farthest - first) / max(1, self.farthest - 1)
        self._at_start[shape] = max(0.0, following), max(0.0, first - following), each

    def of(self, shape: Shape, levels: int | None) -> float:
        """None: it does not follow."""
        if levels is None or shape not in self._at_start:
            return 0.0
        following, first, each = self._at_start[shape]
        return following + (first + (min(levels, self.farthest) - 1) * each if levels else 0.0)


class Costs:
    """Seconds of steps: how fast the machine is just now, times what the shape took at first, and what a drafter added, each corrected.

    So whatever slows every step (longer contexts, other programs, the host's part) is known of shapes too that no step had meanwhile. What
    is surprising in a measurement is put down to each of the three by how uncertain that is: a Kalman filter of logarithms which keeps
    variances and no covariances. No measurement moves them far: a pause of the host is forgotten in a few steps.
    """

    def __init__(self) -> None:
        self.ahead: AheadCosts | None = None  # of a drafter on the device
        self._first: dict[Shape, float] = {}
        self._pace = _factor(PACE)
        self._of_ahead = _factor(AHEAD)
        self._of_shape: dict[Shape, _Factor] = {}
        self._last: dict[Shape, int] = {}  # when it was measured, in measurements of any
        self._num_measured = 0

    def of(self, shape: Shape, levels: int | None = None) -> float:
        """What nobody has measured yet costs in proportion to its tokens, but not less than the nearest that somebody has.

        Args:
            levels: how many tokens ahead a drafter on the device drafts in it; None: it has no part in the step.
        """
        return self._pace.value * (self._alone(shape) + self._drafting(shape, levels))

    def _alone(self, shape: Shape) -> float:
        known = self._first.get(shape)
        if known is not None:
            return known * self._of_shape[shape].value
        if not self._first:
            return float(shape[1])
        nearest = min(self._first, key=lambda other: abs(other[1] - shape[1]))
        return self._alone(nearest) * max(1.0, shape[1] / nearest[1])

    def _drafting(self, shape: Shape, levels: int | None) -> float:
        return 0.0 if self.ahead is None else self._of_ahead.value * self.ahead.of(shape, levels)

    def of_drafting(self, shape: Shape, levels: int | None) -> float:
        """That a drafter adds to such a step."""
        return self._pace.value * self._drafting(shape, levels)

    def of_following(self, num_tokens: int) -> float:
        """That a drafter takes to follow so many tokens of prompts."""
        each = 0.0 if self.ahead is None else self.ahead.prompt_token
        return self._pace.value * self._of_ahead.value * each * num_tokens

    def at_start(self, shape: Shape, seconds: float) -> None:
        """Measured before the first request, without a drafter."""
        self._first[shape] = max(seconds, LEAST)
        self._of_shape[shape] = _factor(SHAPE)

    def add(self, shape: Shape, seconds: float, levels: int | None = None) -> None:
        """A step of this shape took so long, in which a drafter on the device drafted so many tokens ahead."""
        seconds = max(seconds, LEAST)
        passed = self._num_measured - self._last.get(shape, self._num_measured)
        self._num_measured += 1
        self._last[shape] = self._num_measured
        if shape not in self._first:
            self._first[shape] = max(seconds / self._pace.value - self._drafting(shape, levels), 0.1 * seconds)
            self._of_shape[shape] = _factor(NOISE)  # its first run may have paid for more: the second counts as much
            return
        of_shape = self._of_shape[shape]
        self._pace.drift(PACE_DRIFT)
        of_shape.drift(SHAPE_DRIFT, passed)
        self._of_ahead.drift(AHEAD_DRIFT)
        drafting = self._drafting(shape, levels)
        expected = self._alone(shape) + drafting
        share = drafting / expected
        parts = ((self._pace, 1.0), (of_shape, 1.0 - share), (self._of_ahead, share))
        variance = NOISE**2 + sum([part**2 * factor.variance for factor, part in parts])
        most = max(math.log(MOST_SURPRISING), MOST_DEVIATIONS * math.sqrt(variance))
        surprise = min(max(math.log(seconds / (self._pace.value * expected)), -most), most)
        for factor, part in parts:
            factor.learn(surprise, factor.variance * part / variance, part)

    def last(self, shape: Shape) -> int:
        """When it was measured; 0: never, or at the start."""
        return self._last.get(shape, 0)

    def age(self, shape: Shape) -> int:
        """How many measurements there were since."""
        return self._num_measured - self.last(shape)
