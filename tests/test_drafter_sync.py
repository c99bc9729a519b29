"""A device drafter: when it runs, how far it drafts, and for whom, with a controller that is told
what to want.
"""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.speculation.controller import PROBE_SHARE
from jaxpage.speculation.costs import Costs
from jaxpage.speculation.drafter_sync import MAX_LOSS, DrafterSync
from jaxpage.step.limits import StepLimits
from jaxpage.step.plan import Row, Sample, StepPlan

LIMITS = StepLimits(4, 64, 4, mixed=True, decoded=(1, 2, 4), verified=((4, 8),))
LONG = 10_000


def plan_of(*rows: tuple[int, int], forks: dict[int, int] | None = None) -> StepPlan:
    """Returns a plan.

    rows: sequences and where they begin. forks: of a new sequence, the row that it is drawn from.
    """
    made = tuple(Row(sequence_id, start, (1,), ((1,),)) for sequence_id, start in rows)
    drawn = [(index, row.sequence_id) for index, row in enumerate(made)] + [
        (r, s) for s, r in (forks or {}).items()
    ]
    samples = tuple(
        Sample(row, 0, sequence_id, SamplingParams(), 0, 0, 1) for row, sequence_id in drawn
    )
    return StepPlan(0, made, samples)


def wishes(*, drafts: bool = False, depth: int = 3, run: float = 0.1, each: float = 0.0) -> Any:
    """Returns a controller that wants drafts of this depth.

    run, each: how much a drafter adds to a step of one second, and for each depth.
    """
    costs = Costs()
    for shape in ((1, 1), (2, 2), (4, 4), LIMITS.shape(1, 3)):
        costs.at_start(shape, 1.0, [1.0 + run + each * ahead for ahead in range(8)])
    return SimpleNamespace(is_on=drafts, depth=depth, costs=costs)


def run(
    sync: DrafterSync, plan: StepPlan, num_tokens: int | None = None, drafted: bool = True
) -> int | None:
    """Runs a step that gave so many tokens; None: one to each row."""
    depth = sync.depth(plan)
    sync.ran(dataclasses.replace(plan, draft_depth=depth), num_tokens or len(plan.rows), drafted)
    return depth


def prompt_of(sequence_id: int, num_tokens: int = 5) -> StepPlan:
    plan = plan_of((sequence_id, 0))
    return dataclasses.replace(
        plan, rows=(Row(sequence_id, 0, (1,) * num_tokens, ((sequence_id,),)),)
    )


def test_without_a_controller_it_always_drafts_as_far_as_there_is_room():
    sync = DrafterSync(LIMITS, None, block_size=4)
    assert {run(sync, plan_of((1, 5))) for _ in range(500)} == {7} and sync.ready == {1}


def test_it_is_off_when_it_has_lost_too_much_and_on_again_with_a_new_request():
    """It loses at most that share of the steps, by count."""
    sync = DrafterSync(LIMITS, wishes(depth=0), block_size=4)
    steps = [run(sync, plan_of((1, 5))) for _ in range(LONG)]
    num_on = steps.index(None)
    assert set(steps[:num_on]) == {0} and set(steps[num_on:]) == {None}
    assert num_on == pytest.approx(MAX_LOSS / 0.1, abs=1.5) and sync.is_off and sync.is_stale(1)
    assert run(sync, plan_of((1, 5), (2, 0))) == 0, "a new request comes"
    assert sync.is_stale(1) and not sync.is_stale(2)
    fresh = [run(sync, plan_of((number, 0))) for number in range(3, LONG)]
    assert (
        0.1 * sum(depth is not None for depth in fresh) <= 1.1 * PROBE_SHARE * LONG + MAX_LOSS + 1
    )


def test_while_drafts_gain_it_stays_on():
    sync = DrafterSync(LIMITS, wishes(drafts=True, each=0.1), block_size=4)
    assert {run(sync, plan_of((1, 5)), 2) for _ in range(500)} == {3}
    assert None in {run(sync, plan_of((1, 5)), 1) for _ in range(LONG)}, (
        "drafts are wanted and never right"
    )


@pytest.mark.parametrize(("prompt_token", "is_off"), [(0.05, False), (0.5, True)])
def test_prompts_that_cost_more_than_drafts_gain(prompt_token, is_off):
    """The time for prompts is weighed against what drafts gain of the few tokens after them."""
    controller = wishes(drafts=True)
    controller.costs.prompt_token = prompt_token
    sync = DrafterSync(LIMITS, controller, block_size=4)
    for _ in range(30):
        run(sync, prompt_of(1, 16))
        last = [run(sync, plan_of((1, 16)), 4) for _ in range(2)]
    assert (last[-1] is None) == is_off


def test_many_prompts_in_a_row_do_not_turn_off_what_pays():
    """Requests that began together end together: the drafts of those prompts are yet to come."""
    controller = wishes(drafts=True)
    controller.costs.prompt_token = 0.05
    sync = DrafterSync(LIMITS, controller, block_size=4)
    for _ in range(5):
        for _ in range(60):
            run(sync, plan_of((1, 16)), 4)
        for number in range(2, 30):
            run(sync, prompt_of(number, 16))
    assert not sync.is_off


def test_heads_without_a_kv_cache_run_only_where_they_draft():
    controller = wishes(depth=0)
    sync = DrafterSync(LIMITS, controller, block_size=4, has_kv=False)
    assert {run(sync, plan_of((1, 5))) for _ in range(LONG)} == {None} and not (
        sync.is_off or sync.is_stale(1)
    )
    controller.depth = 3
    assert run(sync, plan_of((1, 5))) == 3 and sync.ready == {1}


def test_before_prompts_nothing_is_drafted():
    """The next step computes prompts, and verifies nothing; but where prompts and decoding
    alternate, it decodes.
    """
    sync = DrafterSync(LIMITS, None, block_size=4)
    assert sync.depth(prompt_of(1), others_wait=True) == 0
    assert sync.depth(prompt_of(1)) == sync.depth(plan_of((1, 5)), others_wait=True) == 7
    assert run(sync, dataclasses.replace(plan_of((1, 0)), samples=())) == 0, "the prompt goes on"
    alternating = DrafterSync(dataclasses.replace(LIMITS, mixed=False), None, block_size=4)
    assert alternating.depth(prompt_of(1), others_wait=True) == 7


def test_drafts_hold_until_their_sequence_has_run():
    """A step between, that computes the prompts of others, does not take them away."""
    sync = DrafterSync(dataclasses.replace(LIMITS, mixed=False), None, block_size=4)
    run(sync, plan_of((1, 5)))
    run(sync, prompt_of(2))
    assert sync.ready == {1, 2}
    run(sync, plan_of((1, 6), (2, 5)), drafted=False)
    assert not sync.ready, "a shape that does not draft"
    run(sync, plan_of((1, 7)))
    sync.forget([1])
    assert not sync.ready


def test_a_fork_of_as_many_draws_as_its_prompt_has_tokens_is_no_decoding():
    """Its samples have missed every token of the prompt that the drafter has missed."""
    sync = DrafterSync(LIMITS, wishes(), block_size=4)
    samples = tuple(Sample(0, 2, child, SamplingParams(), 0, 0, 3) for child in (5, 6, 4))
    plan = StepPlan(0, (Row(4, 0, (1,) * 3, ((1,),)),), samples)
    assert plan.num_tokens == len(plan.samples) and not plan.decodes
    with mock.patch.object(sync, "_choose", return_value=None):
        sync.depth(plan)
    assert [sync.is_stale(sequence_id) for sequence_id in (4, 5, 6)] == [True] * 3


SIZE = 2  # slots of a block
events = st.lists(
    st.tuples(
        st.booleans(), st.integers(0, 3), st.integers(1, 3), st.integers(0, 2), st.booleans()
    ),
    max_size=40,
)


@given(events)
def test_it_drafts_for_those_alone_whose_every_token_it_has_computed(history):
    """A record of every slot is the oracle.

    Sequences grow, or new ones adopt the first blocks of others, as from the prefix cache; some
    begin anew, and some are forked.
    """
    sync = DrafterSync(LIMITS, None, block_size=SIZE)
    computed: dict[int, dict[int, bool]] = {}  # by block and slot
    tables: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    new_ids = itertools.count()
    new_blocks = itertools.count(1)
    for follows, who, num_tokens, adopted, forks in history:
        sequence_id = sorted(tables)[who] if who < len(tables) else next(new_ids)
        if sequence_id not in tables:
            source = min(tables, default=None)
            full = 0 if source is None else min(adopted, lengths[source] // SIZE)
            tables[sequence_id], lengths[sequence_id] = (
                tables[source][:full] if source is not None else [],
                full * SIZE,
            )
        elif adopted == 2 and forks:  # it starts over
            tables[sequence_id], lengths[sequence_id] = [], 0
        start = lengths[sequence_id]
        table = tables[sequence_id]
        for position in range(start, start + num_tokens):
            if position // SIZE == len(table):
                table.append(next(new_blocks))
                computed[table[-1]] = {}
            computed[table[position // SIZE]][position % SIZE] = follows
        lengths[sequence_id] = start + num_tokens
        row = Row(sequence_id, start, (1,) * num_tokens, (tuple(table),))
        sample = Sample(0, num_tokens - 1, sequence_id, SamplingParams(), 0, 0, 1)
        plan = StepPlan(0, (row,), (sample,))
        with mock.patch.object(sync, "_choose", return_value=3 if follows else None):
            plan = dataclasses.replace(plan, draft_depth=sync.depth(plan))
        sync.ran(plan, 1)
        whole = all(all(slots.values()) for slots in (computed[block] for block in table))
        assert sync.is_stale(sequence_id) == (not whole)
        assert (sequence_id in sync.ready) == (follows and whole)
