"""The knowledge of the controller of speculation about how long steps take."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpage.assembly import step_costs
from jaxpage.assembly.step_costs import describe_break_even, full_step
from jaxpage.device.inputs.buckets import make_menu
from jaxpage.engine.batch_builder import BatchBuilder
from jaxpage.speculation.controller import Controller
from jaxpage.speculation.costs import Costs
from jaxpage.step.limits import StepLimits

PLAIN, DRAFTS, MORE = (4, 4), (4, 16), (4, 32)
FIRST = {PLAIN: 1.0, DRAFTS: 2.0, MORE: 4.0}


def make_limits(drafts: int) -> StepLimits:
    return StepLimits(8, 64, 1, True, verified=((4, 1 + drafts),), decoded=(4,))


def test_drafts_pay_from_what_their_step_takes_longer():
    """A step of four rows with three drafts each takes 1.75 times as long."""
    controller = Controller(make_limits(3))
    controller.costs.at_start((4, 4), 1.0)
    controller.costs.at_start((4, 16), 1.75)
    assert controller.break_even(4) == 0.75
    assert describe_break_even(controller, [4]) == (
        "drafts pay by the accepted ones of a sequence and step: from 0.75 with 4 sequences"
    )
    controller = Controller(make_limits(1))
    controller.costs.at_start((4, 4), 1.0)
    controller.costs.at_start((4, 8), 2.5)
    assert controller.break_even(4) is None
    assert "never with 4 sequences" in describe_break_even(controller, [4])


def test_drafts_cost_less_of_a_step_with_a_long_context(monkeypatch):
    """The device takes a second a query token, and one for each hundred tokens that a row sees."""
    menu = make_menu(4, 64, num_drafts=(3,), max_verified_tokens=16)
    blocks = [range(1, 801)]
    builder = BatchBuilder(menu, table_width=200, block_size=8, blocks=blocks, vocab_size=20)
    clock = [0.0]

    class Runner:
        def run(self, plan):
            clock[0] += plan.num_tokens + sum(row.start for row in plan.rows) / 100

    monkeypatch.setattr(builder, "build", lambda plan: plan)
    monkeypatch.setattr(step_costs.time, "monotonic", lambda: clock[0])
    controller = Controller(make_limits(3))
    step_costs.measure_costs(builder.menu, builder, Runner(), controller)
    for context in (128, 500, 1500):
        controller.costs.context = context
        plain, drafts = (4 + 4 * context / 100, 16 + 4 * context / 100)
        assert controller.costs.of((4, 4)) == pytest.approx(plain)
        assert controller.break_even(4) == pytest.approx(drafts / plain - 1)
    controller.costs.context = 0
    assert controller.costs.of((4, 4)) == pytest.approx((4 + 4 * 1.28) / 2), "half, and not less"


def make_known() -> Costs:
    costs = Costs()
    for shape, seconds in FIRST.items():
        costs.at_start(shape, seconds, [seconds + 0.1, seconds + 0.3, seconds + 0.5])
    return costs


@pytest.mark.parametrize("table_width", [1, 2, 3, 40])
def test_full_steps_fit_into_the_shortest_context(table_width):
    """A shape may have room for more tokens of a row than a sequence can have."""
    menu = make_menu(4, 64, num_drafts=(3, 31), max_verified_tokens=256)
    for groups in ([range(1, 9)], [range(1, 9), range(9, 12)]):
        builder = BatchBuilder(
            menu, table_width=table_width, block_size=8, blocks=groups, vocab_size=20
        )
        for bucket in menu.buckets:
            plan = full_step(builder, bucket)
            batch = builder.build(plan)
            assert max(row.context_length for row in plan.rows) <= 8 * table_width
            assert batch.bucket == bucket or bucket.num_tokens > 8 * table_width * bucket.num_rows


def test_costs_follow_the_machine_and_not_its_pauses():
    costs = make_known()
    for shape, seconds in 20 * list(FIRST.items()):
        costs.add(shape, None, seconds)
    for _ in range(50):
        costs.add(PLAIN, None, 3.0)
    assert costs.of(PLAIN) == pytest.approx(3.0, rel=0.05)
    assert 3.5 < costs.of(DRAFTS) < 6.5, "what slows one shape slows the others"
    costs.add(PLAIN, None, 300.0)
    assert costs.of(PLAIN) < 3.4


@pytest.mark.parametrize("wrong", [0.5, 0.7, 1.5, 2.0])
def test_what_was_measured_wrong_at_the_start_is_put_right(wrong):
    """Four probes do it; and it is not put down to the pace, so that other shapes do not seem to
    have changed.
    """
    costs, random = make_known(), np.random.default_rng(0)
    for _ in range(4):
        for _ in range(16):
            costs.add(PLAIN, None, 1.3 * random.lognormal(0, 0.05))
        costs.add(DRAFTS, None, 1.3 * 2.0 * wrong * random.lognormal(0, 0.05))
    assert costs.of(DRAFTS) == pytest.approx(1.3 * 2.0 * wrong, rel=0.2)
    assert costs.of(PLAIN) == pytest.approx(1.3, rel=0.08)


def test_a_drafter_takes_time_by_its_depth():
    costs = make_known()
    assert [costs.of(PLAIN, depth) for depth in (None, 0, 1, 2, 9)] == pytest.approx(
        [1.0, 1.1, 1.3, 1.5, 1.5]
    )
    for _ in range(50):
        costs.add(PLAIN, 2, 3.0)
    assert costs.of(PLAIN, 2) == pytest.approx(3.0, rel=0.05) and costs.of(PLAIN) == pytest.approx(
        2.0, rel=0.05
    )


def test_a_clock_that_stands_still():
    costs = Costs()
    costs.at_start(PLAIN, 0.0)
    for seconds in (0.0, 1.0, 0.0):
        costs.add(PLAIN, None, seconds)
    assert costs.of(PLAIN) > 0 and (4, 8) not in costs
