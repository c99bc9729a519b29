"""What is known of how long steps take: beside an exact filter, and what was measured wrong at the start is put right."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.speculation import costs as module
from jaxpage.speculation.costs import AheadCosts, Costs, Shape

PLAIN, DRAFTS, MORE = (4, 4), (4, 16), (4, 32)
FIRST = {PLAIN: 1.0, DRAFTS: 2.0, MORE: 4.0}


def known(first: dict[Shape, float] = FIRST, following: float = 0.0, ahead: float = 0.0) -> Costs:
    """following, ahead: seconds of a drafter, in steps of any shape, in which it drafts one token."""
    costs = Costs()
    if following or ahead:
        costs.ahead = AheadCosts(7, each_level=True)
    for shape, seconds in first.items():
        costs.at_start(shape, seconds)
        if costs.ahead is not None:
            costs.ahead.at_start(shape, following, following + ahead, following + 7 * ahead)
    return costs


def test_costs_follow_the_machine_and_not_its_pauses() -> None:
    costs = known()
    for _ in range(50):
        costs.add(PLAIN, 3.0)
    assert costs.of(PLAIN) == pytest.approx(3.0, rel=0.05)
    assert 4.0 < costs.of(DRAFTS) < 6.5, "what slows one shape slows the others"
    costs.add(PLAIN, 300.0)
    assert costs.of(PLAIN) < 3.2


def test_what_nobody_has_measured() -> None:
    assert Costs().of((4, 8)) == 8.0
    costs = known({PLAIN: 1.0, DRAFTS: 2.0})
    assert costs.of((4, 8)) == 2.0 and costs.of(MORE) == 4.0 and costs.last(MORE) == 0
    costs.add(MORE, 30.0)  # compiled, perhaps
    costs.add(MORE, 3.0)
    assert costs.of(MORE) < 15.0 and costs.last(MORE) == 2 and costs.of(PLAIN) < 1.5


def test_a_clock_that_stands_still() -> None:
    costs = known({PLAIN: 0.0})
    for seconds in (0.0, 1.0, 0.0):
        costs.add(PLAIN, seconds)
        costs.add(MORE, seconds)
    assert costs.of(PLAIN) > 0 and costs.of(MORE) > 0


def look(costs: Costs, wrong: float, num_looks: int, levels: int | None = None) -> None:
    """Steps without drafts as they were measured at the start, and now and then one of another kind that takes `wrong` times as long."""
    random, slow = np.random.default_rng(0), 1.3
    for _ in range(num_looks):
        for _ in range(16):
            costs.add(PLAIN, slow * FIRST[PLAIN] * random.lognormal(0, 0.05))
        seconds = FIRST[DRAFTS] * wrong if levels is None else FIRST[DRAFTS] + wrong * 0.5 * levels
        costs.add(DRAFTS, slow * seconds * random.lognormal(0, 0.05), levels)


@pytest.mark.parametrize("wrong", [0.4, 0.7, 1.5, 2.5])
def test_what_was_measured_wrong_at_the_start_is_put_right(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By looks, however seldom they are; and it is not put down to the pace, so that other shapes do not seem to have changed."""
    costs, mistaken = known(), known()
    look(costs, wrong, 4)
    assert costs.of(DRAFTS) == pytest.approx(1.3 * 2.0 * wrong, rel=0.2)
    assert costs.of(PLAIN) == pytest.approx(1.3, rel=0.08)
    monkeypatch.setattr(module, "SHAPE_DRIFT", 0.0)
    for factor in mistaken._of_shape.values():
        factor.variance = 1e-4
    look(mistaken, wrong, 4)
    assert mistaken.of(DRAFTS) != pytest.approx(1.3 * 2.0 * wrong, rel=0.2), "who trusts the start is wrong for long"


@pytest.mark.parametrize("wrong", [0.3, 2.0])
def test_what_drafting_ahead_takes_is_put_right(wrong: float) -> None:
    costs = known(ahead=0.5)
    for _ in range(50):  # the shape itself is known
        costs.add(DRAFTS, 2.6)
    look(costs, wrong, 8, levels=4)
    assert costs.of(DRAFTS, 4) == pytest.approx(1.3 * (2.0 + 2.0 * wrong), rel=0.1)
    assert costs.of(MORE, 4) - costs.of(MORE) == pytest.approx(1.3 * 2.0 * wrong, rel=0.35), "of other shapes as well"
    assert costs.of(DRAFTS) == pytest.approx(2.6, rel=0.12)


class Exact:
    """The same filter with all covariances, in matrices. The parts: the pace, and what each shape differs by."""

    def __init__(self, shapes: Iterable[Shape]) -> None:
        self.places = {shape: 1 + index for index, shape in enumerate(shapes)}
        self.mean = np.zeros(1 + len(self.places))
        self.covariance = np.diag([module.PACE**2] + [module.SHAPE**2] * len(self.places))

    def add(self, shape: Shape, logarithm: float) -> None:
        parts = np.zeros(len(self.mean))
        parts[[0, self.places[shape]]] = 1.0
        self.covariance += np.diag([module.PACE_DRIFT**2] + [0.0] * len(self.places))
        variance = module.NOISE**2 + parts @ self.covariance @ parts
        gain = self.covariance @ parts / variance
        self.mean = self.mean + gain * (logarithm - parts @ self.mean)
        self.covariance = self.covariance - np.outer(gain, parts @ self.covariance)

    def of(self, shape: Shape) -> float:
        return float(np.exp(self.mean[0] + self.mean[self.places[shape]]))


@given(
    seed=st.integers(0, 2**32 - 1),
    pace=st.floats(0.6, 2.0),
    wrong=st.tuples(*[st.floats(0.7, 1.4)] * 3),
    often=st.sampled_from([2, 5, 16]),
)
def test_it_knows_nearly_what_an_exact_filter_knows(
    seed: int, pace: float, wrong: tuple[float, ...], often: int
) -> None:
    """Which keeps what it knows of the differences of shapes too. Of every shape that was measured at least five times."""
    random, costs, exact = np.random.default_rng(seed), known(dict.fromkeys(FIRST, 1.0)), Exact(FIRST)
    true = {shape: pace * factor for shape, factor in zip(FIRST, wrong, strict=True)}
    for number in range(6 * often):
        shape = (DRAFTS, MORE)[number // often % 2] if number % often == 0 else PLAIN
        seconds = true[shape] * random.lognormal(0, 0.05)
        costs.add(shape, seconds)
        exact.add(shape, float(np.log(seconds)))
    for shape in FIRST:
        assert costs.of(shape) == pytest.approx(exact.of(shape), rel=0.12)
