"""The speculator's reports of each step to its controller: what was right, what a grammar refused,
and nothing to decide.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.speculation import Proposer, ProposingSpeculator
from jaxpage.speculation.controller import Controller
from jaxpage.step.draft import Draft, Drafts, chain
from jaxpage.step.edits import Append, Edit
from jaxpage.step.limits import StepLimits
from jaxpage.step.plan import Row, Sample, StepPlan, StepResult
from jaxpage.step.report import StepReport
from jaxpage.step.request import SequenceGroup
from tests.support.fake_device import make_group

LIMITS = StepLimits(
    2, 64, 2, mixed=False, decoded=(2,), verified=((2, 8),) * 2, streams=((2, 4), (2, 8))
)


class Always(Proposer):
    """Drafts the same, always."""

    def __init__(self) -> None:
        self.num_requested = 0

    def propose(self, request: Any, sequence: Any, num_drafts: int) -> Draft:
        self.num_requested += 1
        return chain((5, 6, 7)[:num_drafts])


def decoding() -> SequenceGroup:
    group = make_group("a", 3, [1, 2, 3], max_tokens=500)
    group.sequences[0].num_computed_tokens = 2
    return group


def plan_of(*drafts: int) -> StepPlan:
    row = Row(3, 2, (3, *drafts), ((1,),), parents=tuple(range(len(drafts))))
    places = range(1 + len(drafts))
    return StepPlan(
        1, (row,), tuple(Sample(0, at, 3, SamplingParams(), 0, 0, 3 + at) for at in places)
    )


def controller_of() -> Controller:
    controller = Controller(LIMITS)
    for shape in ((2, 2), (2, 4), (2, 8)):
        controller.costs.at_start(shape, 1.0)
    return controller


class Refusing:
    """Is a grammar that admits so many drafts, one after the other."""

    def __init__(self, num_admitted: int) -> None:
        self.num_admitted = num_admitted

    def mask(self, sequence_id: int, drafts: tuple[int, ...] = ()) -> Any:
        return np.zeros(1, np.uint32) if len(drafts) <= self.num_admitted else None


def observe(
    speculator: ProposingSpeculator, drafts: Drafts, plan: StepPlan, edits: list[Edit]
) -> None:
    nothing = np.zeros((len(plan.samples), 0))
    result: Any = StepResult(*[nothing] * 5)
    speculator.observe(StepReport(drafts, plan, result, edits, []))


def test_costs_are_those_of_the_context_of_the_last_step():
    controller = controller_of()
    speculator = ProposingSpeculator(Always(), LIMITS, controller, vocab_size=9)
    row = Row(3, 7, (3,), ((1, 2, 3),))
    rows = (row, row._replace(sequence_id=4, start=12))
    sample = plan_of().samples[0]
    plan = StepPlan(1, rows, (sample, sample._replace(row=1, sequence_id=4)))
    observe(speculator, Drafts({}, 0.0), plan, [Append(3, 4), Append(4, 4)])
    assert controller.costs.context == 9.5


def test_drafts_that_a_grammar_refuses_are_given_up():
    """Nobody verifies them, so that they would be taken for right as often as at first, and asked
    for in every step.
    """
    proposer = Always()
    strategies: Any = {3: Refusing(0)}
    speculator = ProposingSpeculator(
        proposer, LIMITS, controller_of(), vocab_size=9, strategies=strategies
    )
    for _ in range(400):
        drafts = speculator.propose([decoding()])
        assert not drafts.of
        observe(speculator, drafts, plan_of(), [Append(3, 4)])
    assert proposer.num_requested < 60


@pytest.mark.parametrize(
    ("admitted", "in_step", "drawn", "learned"),
    [
        (3, 3, (5, 6, 8), [((-1, 0, 1), {0, 1})]),  # as without a grammar
        (2, 2, (5, 6, 8), [((-1, 0, 1), {0, 1})]),  # the third was refused: wrong, where it was
        (2, 2, (5, 8), [((-1, 0, 1), {0})]),
        (0, 0, (8,), [((-1, 0, 1), set())]),
        # no room for the second: nothing is known of it, nor of what stood after it
        (2, 1, (5, 8), [((-1,), {0})]),
        (2, 0, (8,), []),
    ],
)
def test_what_is_learned(admitted, in_step, drawn, learned, monkeypatch):
    events: list[Any] = []
    controller = controller_of()
    monkeypatch.setattr(controller, "ask", lambda *_: {3: 3})
    monkeypatch.setattr(controller, "cut", lambda *_: {3: 3})
    monkeypatch.setattr(
        controller,
        "learn_verified",
        lambda _, parents, path: events.append((tuple(parents), set(path))),
    )
    strategies: Any = {3: Refusing(admitted)}
    speculator = ProposingSpeculator(
        Always(), LIMITS, controller, vocab_size=9, strategies=strategies
    )
    drafts = speculator.propose([decoding()])
    assert [len(draft.token_ids) for draft in drafts.of.values()] == [admitted] * (admitted > 0)
    edits: list[Edit] = [
        Append(3, token_id, drafted=index < len(drawn) - 1) for index, token_id in enumerate(drawn)
    ]
    observe(speculator, drafts, plan_of(*(5, 6, 7)[:in_step]), edits)
    assert events == learned


def test_where_there_is_nothing_to_decide_nobody_is_asked(monkeypatch):
    requested: list[int] = []
    controller = controller_of()
    monkeypatch.setattr(controller, "ask", lambda *_: requested.append(1) or {})
    skips = iter([True, True, False, True])
    monkeypatch.setattr(controller, "skips", lambda: next(skips))
    sync: Any = SimpleNamespace(is_off=False, ready=set(), is_stale=lambda _: False)
    speculator = ProposingSpeculator(Always(), LIMITS, controller, vocab_size=9, sync=sync)
    for _ in range(4):
        assert not speculator.propose([decoding()]).of
    assert len(requested) == 1
    sync.is_off, skips = True, iter([False])
    assert not speculator.propose([decoding()]).of and len(requested) == 1, (
        "the drafter on the device is off"
    )


def test_a_proposer_that_failed_is_not_asked_again(caplog):
    class Failing(Always):
        def propose(self, *_: Any) -> Draft:
            raise RuntimeError("it fails")

    speculator = ProposingSpeculator(Failing(), LIMITS, controller_of(), vocab_size=9)
    for _ in range(50):
        assert not speculator.propose([decoding()]).of
    assert speculator.has_failed and caplog.text.count("the proposer failed") == 1
