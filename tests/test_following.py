"""When a drafter on the device follows the text, and whom it can draft for: with a controller that is told what to want."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jaxpage.sampling_params import SamplingParams
from jaxpage.scheduling import StepLimits
from jaxpage.scheduling.plan import Row, Sample, StepPlan
from jaxpage.speculation.following import KEEPS, PATIENCE, RESTS, Following

LIMITS = StepLimits(4, 64, 4, mixed=True, verified=((4, 8),))


def plan_of(*rows: tuple[int, int], forks: dict[int, int] | None = None) -> StepPlan:
    """rows: sequences and where they begin. forks: of a new sequence, the row that it is drawn from."""
    made = tuple(Row(sequence_id, start, (1,), (1,)) for sequence_id, start in rows)
    drawn = [(index, row.sequence_id) for index, row in enumerate(made)] + [(r, s) for s, r in (forks or {}).items()]
    samples = tuple(Sample(row, 0, sequence_id, SamplingParams(), 0, 0, 1) for row, sequence_id in drawn)
    return StepPlan(0, made, samples)


def wishes(*, drafts: bool = False, levels: int = 3) -> Any:
    return SimpleNamespace(drafts=drafts, levels_ahead=levels, num_looks=0, ahead=None)


def run(following: Following, plan: StepPlan) -> int | None:
    levels = following.levels(plan)
    following.ran(plan)
    return levels


def test_without_a_controller_it_always_drafts_as_far_as_there_is_room() -> None:
    following = Following(LIMITS, None)
    for _ in range(2 * PATIENCE):
        assert run(following, plan_of((1, 5))) == 7
    assert following.ready == {1}


def test_it_rests_when_nobody_wants_drafts_and_begins_again_with_a_new_request() -> None:
    controller = wishes(levels=0)
    following = Following(LIMITS, controller)
    steps = [run(following, plan_of((1, 5))) for _ in range(PATIENCE + 1)]
    assert steps == [0] * PATIENCE + [None] and following.has_lost(1)
    rest = RESTS * (PATIENCE + 1)
    assert [run(following, plan_of((1, 5))) for _ in range(rest + 50)] == [None] * (rest + 50)
    assert run(following, plan_of((1, 5), (2, 0))) == 0
    assert following.has_lost(1) and not following.has_lost(2)


def test_a_look_that_found_nothing_ends_its_patience() -> None:
    controller = wishes()
    following = Following(LIMITS, controller)
    for _ in range(10):
        assert run(following, plan_of((1, 5))) == 3
    controller.num_looks = 1
    assert [run(following, plan_of((1, 5))) for _ in range(KEEPS + 2)] == [3] * KEEPS + [None] * 2


def test_while_drafts_are_wanted_it_never_rests() -> None:
    controller = wishes(drafts=True)
    following = Following(LIMITS, controller)
    assert {run(following, plan_of((1, 5))) for _ in range(3 * PATIENCE)} == {3}
    controller.drafts = False
    assert [run(following, plan_of((1, 5))) for _ in range(KEEPS)] == [3] * (KEEPS - 1) + [None]


steps = st.lists(
    st.tuples(st.booleans(), st.sampled_from([(1, 0), (1, 9), (2, 0), (2, 9)]), st.booleans()), max_size=30
)


@given(steps)
def test_it_drafts_for_those_alone_whose_every_token_it_has_computed(
    history: list[tuple[bool, tuple[int, int], bool]],
) -> None:
    """Against a record of what was computed: a sequence that begins anew is whole again; a fork is what its parent is."""
    following = Following(LIMITS, None)
    lost: set[int] = set()
    for number, (follows, (sequence_id, start), forks) in enumerate(history):
        following._levels = 3 if follows else None
        child = 100 + number
        following.ran(plan_of((sequence_id, start), forks={child: 0} if forks else None))
        if not follows:
            lost.add(sequence_id)
        elif start == 0:
            lost.discard(sequence_id)
        if forks and sequence_id in lost:
            lost.add(child)
        assert {one for one in (1, 2, child) if following.has_lost(one)} == lost & {1, 2, child}
        drawn = {sequence_id, child} if forks else {sequence_id}
        assert following.ready == (drawn - lost if follows else set())
    following.forget(lost)
    assert not any(map(following.has_lost, lost))
