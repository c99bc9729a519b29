"""What `Speculation` tells its controller of each step: what was right, what a grammar refused, and nothing while it naps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.speculation.controller import Controller
from jaxpage.speculation.speculation import Speculation
from jaxpage.step.draft import Draft, chain
from jaxpage.step.edits import Append
from jaxpage.step.limits import StepLimits
from jaxpage.step.plan import Row, Sample, StepPlan
from jaxpage.step.request import SequenceGroup
from tests.support.fake_device import make_group

LIMITS = StepLimits(2, 64, 2, mixed=False, decoded=(2,), verified=((2, 8),) * 2, streams=((2, 4), (2, 8)))


class Proposer:
    """Always drafts the same."""

    def __init__(self) -> None:
        self.num_asked = 0

    def propose(self, request: Any, sequence: Any, num_drafts: int) -> Draft:
        self.num_asked += 1
        return chain((5, 6, 7)[:num_drafts])

    def forget(self, group: SequenceGroup) -> None:
        pass


def decoding() -> SequenceGroup:
    group = make_group("a", 3, [1, 2, 3], max_tokens=500)
    group.sequences[0].num_computed_tokens = 2
    return group


def plan_of(*drafts: int) -> StepPlan:
    row = Row(3, 2, (3, *drafts), (1,), parents=tuple(range(len(drafts))))
    places = range(1 + len(drafts))
    return StepPlan(1, (row,), tuple(Sample(0, at, 3, SamplingParams(), 0, 0, 3 + at) for at in places))


def controller_of() -> Controller:
    controller = Controller(LIMITS)
    for shape in ((2, 2), (2, 4), (2, 8)):
        controller.costs.at_start(shape, 1.0)
    return controller


@pytest.mark.parametrize("told", [True, False])
def test_drafts_that_a_grammar_refuses_are_given_up(told: bool) -> None:
    """Nobody verifies them, so that they would be taken for right as often as at first, and asked for in every step."""
    proposer = Proposer()
    speculation = Speculation(proposer, LIMITS, controller_of(), vocab_size=9)
    for _ in range(400):
        if (drafts := speculation.propose([decoding()])) and told:
            speculation.admitted(drafts, {})
        if speculation.has_part:
            speculation.verified(plan_of(), [Append(3, 4)], 1.0, 0.01)
    assert (proposer.num_asked < 60) == told
    assert proposer.num_asked < 60 or proposer.num_asked > 350


@pytest.mark.parametrize(
    ("admitted", "in_step", "drawn", "learned"),
    [
        (3, 3, (5, 6, 8), [((-1, 0, 1), {0, 1})]),  # as without a grammar
        (2, 2, (5, 6, 8), [((-1, 0, 1), {0, 1})]),  # the third was refused: wrong, where it was
        (2, 2, (5, 8), [((-1, 0, 1), {0})]),
        (0, 0, (8,), [((-1, 0, 1), set())]),
        (2, 1, (5, 8), [((-1,), {0})]),  # no room for the second: nothing is known of it, nor of what stood behind it
        (2, 0, (8,), []),
    ],
)
def test_what_is_learned(
    admitted: int,
    in_step: int,
    drawn: tuple[int, ...],
    learned: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    controller = controller_of()
    monkeypatch.setattr(controller, "ask", lambda *_: {3: 3})
    monkeypatch.setattr(controller, "cut", lambda *_: {3: 3})
    monkeypatch.setattr(controller, "verified", lambda _, parents, path: told.append((tuple(parents), set(path))))
    speculation = Speculation(Proposer(), LIMITS, controller, vocab_size=9)
    drafts = speculation.propose([decoding()])
    draft = drafts[3]
    speculation.admitted(drafts, {3: draft.cut(admitted)} if admitted else {})
    edits = [Append(3, token_id, drafted=index < len(drawn) - 1) for index, token_id in enumerate(drawn)]
    speculation.verified(plan_of(*draft.token_ids[:in_step]), edits, 1.0, 0.0)
    assert told == learned


def test_in_a_nap_nobody_is_asked_and_nothing_need_be_told() -> None:
    asked: list[int] = []
    slept: list[int] = []
    controller: Any = SimpleNamespace(nap=3, ask=lambda *_: asked.append(1) or {}, slept=slept.append)
    speculation = Speculation(Proposer(), LIMITS, controller, vocab_size=9)
    parts = []
    for _ in range(9):
        assert speculation.propose([decoding()]) == {}
        parts.append(speculation.has_part)
    assert parts == [True, False, False, False] * 2 + [True]
    assert len(asked) == 3 and slept == [3, 3]


def test_a_drafter_that_follows_again_ends_the_nap() -> None:
    asked: list[int] = []
    controller: Any = SimpleNamespace(ask=lambda *_: asked.append(1) or {}, slept=lambda _: None)
    follows: Any = SimpleNamespace(nap=30, ready=frozenset(), has_lost=lambda _: False, last_levels=None)
    follows.levels = lambda *_: follows.last_levels
    speculation = Speculation(Proposer(), LIMITS, controller, vocab_size=9, following=follows)
    for step in range(12):
        speculation.propose([decoding()])
        follows.last_levels = 0 if step == 9 else None
        speculation.levels(plan_of())
    assert len(asked) == 2, "in the first step, and behind that in which it followed"


def test_a_proposer_that_failed_has_no_part_in_any_step(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Proposer):
        def propose(self, *_: Any) -> Draft:
            raise RuntimeError("it fails")

    controller = controller_of()
    speculation = Speculation(Failing(), LIMITS, controller, vocab_size=9)
    for _ in range(50):
        assert speculation.propose([decoding()]) == {}
    assert not speculation.has_part and caplog.text.count("the proposer failed") == 1
