"""Drafts among requests that come and go: nobody is preempted or waits for them, no block keeps what was wrong, and nothing is drawn twice.

The machines of tests/test_scheduler.py, with right and wrong drafts. Every plan with drafts is compared with the one without.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from jaxpage.memory import BlockManager
from jaxpage.scheduling import Preemption, Scheduler
from jaxpage.scheduling import plan_builder as opening
from jaxpage.step.draft import Draft, chain
from jaxpage.step.limits import StepLimits
from tests.support.drafts import random_draft
from tests.support.fake_device import NUM_TOKEN_IDS, Driver, FakeDevice, alone, make_group
from tests.support.sweeps import few
from tests.test_scheduler import STATE_MACHINE, Scheduling, Searching, make_driver, mistaken_machine

MAX_DRAFTS = 9


class Guesses:
    """Drafts for some of the running sequences, of which it knows what they will draw. Groups that the driver forks have none before."""

    def __init__(self, seed: int, *, branches: bool, window: int | None = None) -> None:
        self.rng = random.Random(seed)
        self.branches = branches
        self.window = window
        self._futures: dict[int, list[int]] = {}

    def __call__(self, scheduler: Scheduler) -> dict[int, Draft]:
        drafts = {}
        for group in scheduler.running:
            if len(group.sequences) < group.request.params.n and not group.child_ids:
                continue
            for sequence in group.unfinished:
                if self.rng.random() < 0.8:
                    future = [] if group.request.beam else self.future(group.request, sequence)
                    num_drafts = self.rng.randrange(1, MAX_DRAFTS)
                    drafts[sequence.sequence_id] = random_draft(
                        self.rng, future, num_drafts, NUM_TOKEN_IDS, branches=self.branches
                    )
        return drafts

    def future(self, request: Any, sequence: Any) -> list[int]:
        key = sequence.sequence_id
        if key not in self._futures:
            self._futures[key] = alone(request, sequence.sample_index, self.window)
        return self._futures[key][sequence.num_output_tokens :]


class Speculating(Searching):
    """Of all kinds of engines."""

    num_right = 0

    @initialize(
        block_size=st.sampled_from([1, 2, 2, 4, 8]),
        num_usable=st.integers(3, 24),
        max_num_seqs=st.integers(1, 6),
        max_tokens=st.integers(1, 24),
        max_chunk_rows=st.integers(1, 6),
        mixed=st.booleans(),
        caching=st.booleans(),
        windows=st.sampled_from([(None,), (None,), (1,), (8,), (None, 3), (None, 1, 6)]),
        num_host_blocks=st.sampled_from([0, 2, 40]),
        policy=st.sampled_from(["fcfs", "fair"]),
        preemption=st.builds(Preemption, st.sampled_from(["auto", "recompute", "swap"])),
        verified=st.sampled_from([((6, 9),), ((2, 9), (6, 3)), ((1, 2), (3, 5), (6, 2))]),
        trees=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    def start(self, seed: int, **settings_: Any) -> None:
        super().start(**settings_)
        self.driver.propose = Guesses(seed, branches=seed % 4 > 0, window=settings_["windows"][0])

    def teardown(self) -> None:
        super().teardown()
        type(self).num_right += self.driver.num_right if hasattr(self, "driver") else 0


class SpeculatingInASmallPool(Scheduling):
    """Narrowed to pools that are too small, with forks, and swapping or not."""

    num_right = 0

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_usable=st.integers(6, 16),
        caching=st.booleans(),
        num_host_blocks=st.sampled_from([0, 60]),
        seed=st.integers(0, 2**16),
    )
    def start(self, seed: int, **settings_: Any) -> None:
        rest = {
            "max_num_seqs": 6,
            "max_tokens": 12,
            "max_chunk_rows": 6,
            "mixed": False,
            "windows": (None,),
        }
        shapes = {
            "verified": ((6, 9),),
            "trees": True,
            "policy": "fcfs",
            "preemption": Preemption("swap"),
        }
        super().start(**settings_, **rest, **shapes)
        self.driver.propose = Guesses(seed, branches=True)

    def teardown(self) -> None:
        super().teardown()
        type(self).num_right += self.driver.num_right if hasattr(self, "driver") else 0


MACHINES = (Speculating, SpeculatingInASmallPool)


@pytest.mark.parametrize("machine", MACHINES)
def test_with_drafts_every_request_draws_what_it_draws_alone(machine):
    run_state_machine_as_test(machine, settings=STATE_MACHINE)
    assert machine.num_right > 100  # type: ignore[attr-defined]


class GivesWayForDrafts(Scheduler):
    def _plan_drafts(self, step, drafts):
        needed = (
            sum(len(draft.token_ids) for draft in drafts.values()) // self.block_manager.block_size
        )
        if self.num_running > 1 and self.block_manager.groups[0].pool.num_free < needed:
            group = self._requests.preempt_last(step)
            step.work = [work for work in step.work if work[0] is not group]
        super()._plan_drafts(step, drafts)


class KeepsWhatWrongDraftsHad(BlockManager):
    def trim(self, sequence_id, num_tokens):
        pass


class CountsWrongDraftsAsComputed(Scheduler):
    def commit(self, plan, edits):
        edits = [
            replace(edit, drafted=False) if hasattr(edit, "drafted") else edit for edit in edits
        ]
        return super().commit(
            replace(plan, rows=tuple(row._replace(parents=()) for row in plan.rows)), edits
        )


class HashesDrafts(Scheduler):
    """The prefix cache is told of drafts as if they were tokens."""

    def commit(self, plan, edits):
        for row in plan.rows:
            if row.parents and row.sequence_id in self.block_manager.sequence_ids:
                group, sequence = self._requests.sequences[row.sequence_id]
                tokens, digests = (
                    [*sequence.token_ids, *row.token_ids[1:]],
                    [*sequence.block_digests],
                )
                salt = group.request.params.cache_salt
                self.block_manager.cache(row.sequence_id, row.context_length, tokens, digests, salt)
        return super().commit(plan, edits)


class DraftsPastTheEnd(Scheduler):
    def _plan_drafts(self, step, drafts):
        longer = {}
        for group, sequence, _ in step.work:
            longer[sequence.sequence_id] = (
                group.request,
                replace(group.request, max_total_tokens=group.request.max_total_tokens + 1),
            )
            group.request = longer[sequence.sequence_id][1]
        super()._plan_drafts(step, drafts)
        for group, sequence, _ in step.work:
            group.request = longer[sequence.sequence_id][0]


class DraftsForBeams(Scheduler):
    def _plan_drafts(self, step, drafts):
        beams = [(group, group.request) for group, _, _ in step.work if group.request.beam]
        for group, request in beams:
            group.request = replace(request, beam=None)
        super()._plan_drafts(step, drafts)
        for group, request in beams:
            group.request = request


class DraftsBesideChunks(Scheduler):
    """The last token of a chunk that is cut to one is taken for one that decodes."""

    def _plan_drafts(self, step, drafts):
        held = [(sequence, sequence.token_ids) for _, sequence, count in step.work if count == 1]
        for sequence, token_ids in held:
            sequence.token_ids = token_ids[: sequence.num_computed_tokens + 1]
        super()._plan_drafts(step, drafts)
        for sequence, token_ids in held:
            sequence.token_ids = token_ids


class VerifiesMoreThanTheShapesHold(Scheduler):
    def _plan_drafts(self, step, drafts):
        limits, self.limits = self.limits, replace(self.limits, verified=((64, 64),))
        super()._plan_drafts(step, drafts)
        self.limits = limits


class BranchesWhereShapesHoldChains(Scheduler):
    def _plan_drafts(self, step, drafts):
        limits, self.limits = self.limits, replace(self.limits, trees=True)
        super()._plan_drafts(step, drafts)
        self.limits = limits


QUICKLY_SEEN = [
    *(CountsWrongDraftsAsComputed, DraftsForBeams),
    *(VerifiesMoreThanTheShapesHold, BranchesWhereShapesHoldChains),
]
SEEN_LATE = [
    *(GivesWayForDrafts, KeepsWhatWrongDraftsHad, HashesDrafts),
    *(DraftsPastTheEnd, DraftsBesideChunks),
]


@pytest.mark.parametrize("mistaken", few(QUICKLY_SEEN + SEEN_LATE, QUICKLY_SEEN))
def test_the_machines_see_planted_mistakes(mistaken):
    machine = mistaken_machine(Speculating, mistaken)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        run_state_machine_as_test(
            machine, settings=settings(STATE_MACHINE, phases=[Phase.generate], max_examples=1500)
        )


def forgets_the_branch(sample, draft, sequence, request):
    """What may be drawn behind a draft, as if the drafts before it were not there."""
    return [
        sample._replace(offset=1 + index, position=sample.position + depth)
        for index, depth in enumerate(draft.depths)
    ]


def counts_places_for_depths(sample, draft, sequence, request):
    samples = right_samples(sample, draft, sequence, request)
    return [each._replace(position=sample.position + each.offset) for each in samples]


right_samples = opening.make_draft_samples


@pytest.mark.parametrize(
    "mistaken", few([forgets_the_branch, counts_places_for_depths], [counts_places_for_depths])
)
def test_the_machines_see_mistakes_in_what_is_drawn(mistaken, monkeypatch):
    monkeypatch.setattr(opening, "make_draft_samples", mistaken)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Speculating,
            settings=settings(STATE_MACHINE, phases=[Phase.generate], max_examples=1500),
        )


@pytest.mark.sweep
def test_the_machines_see_that_nothing_is_moved(monkeypatch):
    verify = FakeDevice.verify

    def stays(self, row, drawn):
        slots, contexts = (
            [each.copy() for each in self.slots],
            [each.copy() for each in self.contexts],
        )
        path = verify(self, row, drawn)
        self.slots, self.contexts = slots, contexts
        return path

    monkeypatch.setattr(FakeDevice, "verify", stays)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Speculating,
            settings=settings(STATE_MACHINE, phases=[Phase.generate], max_examples=1500),
        )


def drafting(driver: Driver, *drafts: Draft) -> None:
    """Proposes the same drafts for the running sequences in every step."""

    def propose(scheduler: Scheduler) -> dict[int, Draft]:
        ids = [sequence.sequence_id for group in scheduler.running for sequence in group.unfinished]
        return dict(zip(ids, drafts, strict=False))

    driver.propose = propose


def test_drafts_are_cut_to_the_blocks_that_are_free():
    """5 blocks of 4: two sequences of 7 known tokens have 4, one of the drafts that go on behind them gets the last."""
    driver = make_driver(num_blocks=6, block_size=4, verified=((2, 9),))
    wrong = chain((NUM_TOKEN_IDS - 1,) * 8)
    for request_id in ("a", "b"):
        driver.scheduler.add(
            make_group(request_id, ord(request_id), range(6), max_tokens=14, ignore_eos=True)
        )
    driver.step()
    drafting(driver, wrong, wrong)
    assert driver.scheduler.block_manager.groups[0].pool.num_free == 1
    driver.step()
    # up to position 11, and up to 7
    assert [len(row.parents) for row in driver.plans[-1].rows] == [5, 1]
    assert (
        driver.scheduler.block_manager.groups[0].pool.num_free == 1
        and not driver.plans[-1].preempted
    )


def test_a_tree_is_a_chain_where_shapes_hold_chains_only():
    tree = Draft((1, 2, 3, 4, 5), (-1, -1, 0, 1, 2))
    for trees, parents in ((True, (0, 0, 1, 2, 3)), (False, (0, 1, 2))):
        driver = make_driver(verified=((2, 9),), trees=trees)
        driver.scheduler.add(make_group("a", 1, range(6), max_tokens=30, ignore_eos=True))
        driver.step()
        drafting(driver, tree)
        driver.step()
        assert driver.plans[-1].rows[0].parents == parents
        assert driver.plans[-1].branches == trees
        assert driver.plans[-1].rows[0].token_ids[1:] == ((1, 2, 3, 4, 5) if trees else (1, 3, 5))


def test_limits_say_how_many_drafts_a_row_may_have():
    limits = StepLimits(8, 16, 4, False, ((2, 9), (4, 4), (8, 2)))
    assert [limits.max_drafts(rows) for rows in (1, 2, 3, 4, 5, 8, 9)] == [8, 8, 3, 3, 1, 1, 0]
