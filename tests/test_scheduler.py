"""Scheduler: a state machine on a fake device whose draws depend on what is read, the naive model
being each request alone.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxpage.engine.processor_inputs import processor_inputs_of
from jaxpage.errors import CapacityError
from jaxpage.memory import BlockManager, BlockPool, BlockTables, Prefix, PrefixIndex
from jaxpage.outputs import TokenLogprobs
from jaxpage.scheduling import POLICIES, Preemption, Scheduler
from jaxpage.scheduling import scheduler as planning
from jaxpage.scheduling.admitting import beginnings
from jaxpage.scheduling.plan_builder import make_draft_samples
from jaxpage.scheduling.running_set import RunningSet
from jaxpage.settings.sampling_params import BeamSearchParams
from jaxpage.step.draft import chain
from jaxpage.step.edits import Append, Drop, Edit, Finish, Fork
from jaxpage.step.limits import StepLimits
from jaxpage.step.request import Sequence, SequenceGroup
from tests.support.beams import naive_search, random_logprobs
from tests.support.fake_device import (
    EOS,
    NUM_TOKEN_IDS,
    Driver,
    alone,
    make_beam_group,
    make_group,
    scores_alone,
)
from tests.support.sweeps import few


def make_driver(
    *,
    num_blocks: int = 65,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_tokens: int = 16,
    max_chunk_rows: int = 4,
    mixed: bool = False,
    caching: bool = False,
    num_following: int = 0,
    windows: tuple[int | None, ...] = (None,),
    num_host_blocks: int = 0,
    policy: str = "fcfs",
    preemption: Preemption | None = None,
    verified: tuple[tuple[int, int], ...] = (),
    trees: bool = False,
    scheduler_class: type[Scheduler] = Scheduler,
    running_set_class: type[RunningSet] = RunningSet,
    manager_class: type[BlockManager] = BlockManager,
    tables_class: type[BlockTables] = BlockTables,
    index_class: type[PrefixIndex] = PrefixIndex,
) -> Driver:
    """Makes a driver whose cache groups have pools of so many blocks each, on the host as well."""
    limits = StepLimits(max_num_seqs, max_tokens, max_chunk_rows, mixed, verified, trees)
    groups = [
        tables_class(
            BlockPool(num_blocks + index * (num_blocks - 1), first=1 + index * (num_blocks - 1)),
            block_size,
            host_pool=BlockPool(
                (index + 1) * num_host_blocks + 1, first=index * num_host_blocks + 1
            )
            if num_host_blocks
            else None,
            sliding_window=window,
            max_tokens=limits.max_row_length,
        )
        for index, window in enumerate(windows)
    ]
    index = index_class(block_size, num_following=num_following) if caching else None
    manager = manager_class(groups, index)
    queue = POLICIES[policy]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "RunningSet", running_set_class)
        return Driver(
            scheduler_class(
                limits, manager, max_num_seqs=max_num_seqs, queue=queue, preemption=preemption
            )
        )


def query_lens(driver: Driver) -> list[list[int]]:
    return [[len(row.token_ids) for row in plan.rows] for plan in driver.plans]


class Scheduling(RuleBasedStateMachine):
    """Lets requests come, go and step in any order.

    A request must draw what it draws alone, in exactly as many tokens.
    """

    scheduler_class: type[Scheduler] = Scheduler
    running_set_class: type[RunningSet] = RunningSet
    manager_class: type[BlockManager] = BlockManager
    tables_class: type[BlockTables] = BlockTables
    index_class: type[PrefixIndex] = PrefixIndex

    @initialize(
        block_size=st.sampled_from([1, 2, 2, 4, 8]),
        num_usable=st.integers(3, 24),
        max_num_seqs=st.integers(1, 6),
        max_tokens=st.integers(1, 24),
        max_chunk_rows=st.integers(1, 6),
        mixed=st.booleans(),
        caching=st.sampled_from([True, True, False]),
        num_following=st.integers(0, 1),
        windows=st.sampled_from([(None,), (None,), (1,), (8,), (None, 3), (None, 1, 6), (8, 3)]),
        num_host_blocks=st.sampled_from([0, 2, 40]),
        policy=st.sampled_from(sorted(POLICIES)),
        preemption=st.builds(
            Preemption,
            st.sampled_from(["auto", "recompute", "swap"]),
            st.sampled_from(["readmitted", "completed"]),
        ),
    )
    def start(self, num_usable: int, **settings_: Any) -> None:
        self.window, self.policy = settings_["windows"][0], settings_["policy"]
        self.new_pin_id = itertools.count(-1, -1).__next__
        classes = {name: getattr(self, name) for name in (*KINDS.values(), "index_class")}
        self.driver = make_driver(num_blocks=num_usable + 1, **classes, **settings_)
        self.arrived: list[SequenceGroup] = []  # in order, without the aborted
        self.accepted: list[SequenceGroup] = []
        self.ended: set[str] = set()

    @rule(
        seed=st.integers(0, 2**32),
        num_prompt=st.integers(1, 20),
        max_tokens=st.integers(1, 24),
        n=st.sampled_from([1, 1, 2, 3]),
        ignore_eos=st.booleans(),
        num_common=st.sampled_from([0, 9, 20, 20]),
        cache_salt=st.sampled_from([None, None, "pepper"]),
        user=st.sampled_from([None, "ann", "bob"]),
        priority=st.integers(-1, 2),
    )
    def add(
        self, seed: int, num_prompt: int, max_tokens: int, n: int, ignore_eos: bool, **others: Any
    ) -> None:
        scheduler = self.driver.scheduler
        sequence_id = self.driver.new_sequence_id()
        if self.window:
            num_prompt = num_prompt * 4 - seed % 4  # several times what the window and a step hold
        elif seed % 4:  # else it may be too long, and be refused
            num_slots = (
                scheduler.block_manager.groups[0].pool.num_usable
                // n
                * scheduler.block_manager.block_size
            )
            num_prompt = max(1, min(num_prompt, num_slots // 2))
            max_tokens = max(1, min(max_tokens, num_slots - num_prompt))
        num_common = others.pop("num_common")
        prompt = random.Random(seed).choices(range(NUM_TOKEN_IDS), k=num_prompt)
        prompt[:num_common] = random.Random(1).choices(
            range(NUM_TOKEN_IDS), k=min(num_common, num_prompt)
        )
        minimum = seed % (max_tokens + 1)
        group = make_group(
            str(sequence_id),
            sequence_id,
            prompt,
            max_tokens=max_tokens,
            n=n,
            min_tokens=minimum,
            ignore_eos=ignore_eos,
            prompt_logprobs=0 if seed % 3 == 1 else None,
            **others,
        )
        if seed // 4 % 2:  # the plan forks; else whoever answers the first draw
            group.child_ids = tuple(self.driver.new_sequence_id() for _ in range(1, n))
        block_size, usable = (
            scheduler.block_manager.block_size,
            scheduler.block_manager.groups[0].pool.num_usable,
        )
        maximum = -(-(num_prompt + max_tokens - 1) // block_size)
        # two positions more than it sees, and a step's tokens, wherever a block begins
        if self.window:
            span = self.window + 1 + scheduler.limits.max_row_length
            maximum = min(
                maximum, max((first + span - 1) // block_size + 1 for first in range(block_size))
            )
        refused = n * maximum > usable or n > scheduler.max_num_seqs
        try:
            scheduler.add(group)
        except CapacityError:
            pinned = max(scheduler.block_manager.num_pinned_blocks)
            assert refused or n * maximum > usable - pinned
        else:
            assert not refused
            self.arrived.append(group)
            self.accepted.append(group)
        scheduler.check()

    @precondition(lambda self: len(self.accepted) % 3 == 2)
    @rule()
    def pin(self) -> None:
        """Keeps the prompt of a request that has computed it in place; the request ends."""
        scheduler = self.driver.scheduler
        for group in scheduler.running:
            if group.unfinished[0].num_computed_tokens >= len(group.request.prompt_token_ids):
                before = scheduler.block_manager.num_pinned_blocks
                try:
                    assert scheduler.pin(self.new_pin_id(), group.request.request_id) is group
                except CapacityError:
                    assert scheduler.block_manager.num_pinned_blocks == before
                else:
                    assert group.finished
                    self.arrived.remove(group)
                break
        scheduler.check()

    @rule()
    def unpin(self) -> None:
        for pin_id in list(self.driver.scheduler.block_manager.pins)[:1]:
            self.driver.scheduler.block_manager.unpin(pin_id)
        self.driver.scheduler.check()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = [group for group in self.arrived if group.request.request_id not in self.ended]
        request_id = (
            data.draw(st.sampled_from([g.request.request_id for g in alive]))
            if alive
            else "unknown"
        )
        group = self.driver.scheduler.abort(request_id)
        assert (group is None) == (not alive)
        if group is not None:
            assert group.finished and not any(s.finish_reason is None for s in group.sequences)
            self.arrived.remove(group)
            assert self.driver.scheduler.abort(request_id) is None
        self.driver.scheduler.check()

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for group in self.driver.step():
                if group.finished:
                    self.verify(group)

    @precondition(lambda self: self.driver.scheduler.num_running)
    @rule()
    def lose_the_step(self) -> None:
        """Plans a step that does not happen."""
        self.driver.scheduler.plan()
        self.driver.scheduler.preempt_all()
        self.driver.scheduler.check()

    @precondition(lambda self: len(self.accepted) % 4 == 3)
    @rule()
    def lose_the_pages(self) -> None:
        self.driver.lose_pages()

    @precondition(lambda self: len(self.accepted) % 4 == 3)
    @rule()
    def forget_what_is_cached(self) -> None:
        self.driver.scheduler.block_manager.forget_cached()
        self.driver.scheduler.check()

    def verify(self, group: SequenceGroup) -> None:
        assert group.num_cached_tokens is None or group.num_cached_tokens < len(
            group.request.prompt_token_ids
        )
        self.ended.add(group.request.request_id)
        assert len(group.sequences) == group.request.params.n
        wants_scores = group.request.params.prompt_logprobs is not None
        assert group.prompt_logprobs == (
            scores_alone(group.request, self.window) if wants_scores else []
        )
        for sequence in group.sequences:
            assert sequence.output_token_ids == alone(
                group.request, sequence.sample_index, self.window
            )
            assert len(sequence.output_token_ids) > 0

    @invariant()
    def running_ones_are_the_oldest(self) -> None:
        if not hasattr(self, "driver"):
            return
        alive = [group for group in self.arrived if group.request.request_id not in self.ended]
        scheduler = self.driver.scheduler
        order = (lambda group: 0) if self.policy == "fcfs" else id
        assert sorted([*scheduler.running, *scheduler.waiting], key=order) == sorted(
            alive, key=order
        )
        assert sum(len(group.unfinished) for group in scheduler.running) <= scheduler.max_num_seqs

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        while self.driver.scheduler.has_unfinished:
            self.step(1)
            assert len(self.driver.plans) < 20_000, "no end"
        assert self.ended >= {group.request.request_id for group in self.arrived}
        self.driver.scheduler.check()
        manager, counts = self.driver.scheduler.block_manager, self.driver.scheduler.prefix_counts
        for pin_id in list(self.driver.scheduler.block_manager.pins):
            self.driver.scheduler.block_manager.unpin(pin_id)
        assert manager.num_free == manager.num_usable
        assert counts.num_hits == sum(group.num_cached_tokens or 0 for group in self.accepted)
        assert counts.num_hits <= counts.num_queried


class Searching(Scheduling):
    """Runs beam searches among the others: a naive search is the oracle, and a search has its
    sequence slots and no more.
    """

    @rule(
        seed=st.integers(0, 2**32),
        num_prompt=st.integers(1, 12),
        beam=st.builds(
            BeamSearchParams,
            st.integers(1, 4),
            st.integers(1, 12),
            st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
            st.sampled_from([False, True, "never"]),
            stop_token_ids=st.sampled_from([(), (1, 2, 3, 4, 5)]),
        ),
    )
    def add_search(self, seed: int, num_prompt: int, beam: BeamSearchParams) -> None:
        first_id = self.driver.new_sequence_id()
        for _ in range(2 * beam.beam_width - 1):
            self.driver.new_sequence_id()
        prompt = random.Random(seed % 5).choices(range(NUM_TOKEN_IDS), k=num_prompt)
        group = make_beam_group(str(first_id), first_id, prompt, beam)
        try:
            self.driver.scheduler.add(group)
        except CapacityError:
            return
        self.arrived.append(group)
        self.accepted.append(group)

    def verify(self, group: SequenceGroup) -> None:
        if (beam := group.request.beam) is None:
            return super().verify(group)
        self.ended.add(group.request.request_id)
        prompt = group.request.prompt_token_ids

        def logprobs_of(output: tuple[int, ...]) -> Any:
            known = (*prompt, *output)
            return random_logprobs(known[-self.window :] if self.window else known, NUM_TOKEN_IDS)

        expected = naive_search(
            logprobs_of, beam, group.request.ending_token_ids, beam.max_tokens or 0
        )
        scores = {
            tuple(sequence.output_token_ids): sequence.cumulative_logprob
            / sequence.num_output_tokens**beam.length_penalty
            for sequence in group.sequences
        }
        assert scores == {
            hypothesis.token_ids: pytest.approx(hypothesis.score) for hypothesis in expected
        }
        assert len(scores) == len(group.sequences)
        return None


class Swapping(Scheduling):
    """Is narrowed to pools that are too small and a host that is not."""

    @initialize(
        block_size=st.sampled_from([2, 4]),
        num_usable=st.integers(6, 16),
        max_tokens=st.integers(2, 12),
        windows=st.sampled_from([(None,), (None,), (None, 4)]),
    )
    def start(self, **settings_: Any) -> None:
        others = {"max_num_seqs": 6, "max_chunk_rows": 6, "mixed": False, "caching": False}
        super().start(
            **settings_, **others, num_host_blocks=60, policy="fcfs", preemption=Preemption("swap")
        )


class Caching(Scheduling):
    """Is narrowed to the prefix cache, with neither host nor window."""

    @initialize(
        block_size=st.sampled_from([1, 2, 2, 4, 8]),
        num_usable=st.integers(3, 24),
        max_num_seqs=st.integers(1, 6),
        max_tokens=st.integers(1, 24),
        max_chunk_rows=st.integers(1, 6),
        mixed=st.booleans(),
        num_following=st.integers(0, 1),
    )
    def start(self, **settings_: Any) -> None:
        others = {
            "caching": True,
            "windows": (None,),
            "num_host_blocks": 0,
            "policy": "fcfs",
            "preemption": Preemption(),
        }
        super().start(**settings_, **others)


STATE_MACHINE = settings(stateful_step_count=25)


@pytest.mark.parametrize("machine", [Scheduling, Searching, Swapping, Caching])
def test_scheduler_agrees_with_every_request_alone(machine):
    run_state_machine_as_test(machine, settings=STATE_MACHINE)


KINDS = {
    Scheduler: "scheduler_class",
    RunningSet: "running_set_class",
    BlockManager: "manager_class",
    BlockTables: "tables_class",
}


def mistaken_machine(machine: type[Scheduling], mistaken: type) -> type[Scheduling]:
    kind = next(name for of, name in KINDS.items() if issubclass(mistaken, of))
    return type("Mistaken", (machine,), {kind: mistaken})


class PreemptsTheOldest(RunningSet):
    def preempt_last(self, step):
        oldest = next(iter(self._running))
        self._running[oldest] = self._running.pop(oldest)
        return super().preempt_last(step)


class DrawsSamplesFromChunks(Scheduler):
    def _add_chunks(self, step, group, sequences):
        child_ids, group.child_ids = group.child_ids, ()
        super()._add_chunks(step, group, sequences)
        group.child_ids = child_ids


class KeepsCountAfterPreemption(RunningSet):
    def preempt_last(self, step):
        computed = {s: s.num_computed_tokens for s in self.running[-1].sequences}
        group = super().preempt_last(step)
        for sequence, num_computed in computed.items():
            sequence.num_computed_tokens = num_computed
        return group


class OverfillsChunks(Scheduler):
    def _has_room(self, step):
        return step.num_tokens < self.limits.max_tokens


class DrawsAGroupSeparate(RunningSet):
    """Admits a group without room for all of its sequences."""

    def _give_blocks(self, group, step):
        unfinished, group.sequences = group.sequences, group.sequences[:1]
        admitted = super()._give_blocks(group, step)
        group.sequences = unfinished
        return admitted


class LeaksSequenceSlots(RunningSet):
    def remove(self, group):
        num_sequence_slots = self._num_sequence_slots
        super().remove(group)
        self._num_sequence_slots = num_sequence_slots


class AdmitsOutOfOrder(RunningSet):
    def admit_next(self, step):
        if len(self._queue) > 1:
            first = self._queue.first()
            self._queue.remove(first)
            self._queue.add(first)
        return super().admit_next(step)


class DropsCopies(Scheduler):
    def _make_room(self, group, sequences, step):
        copies = step.copies.copy()
        has_room = super()._make_room(group, sequences, step)
        step.copies[:] = copies
        return has_room


class NeverAlternates(Scheduler):
    def plan(self):
        self._last_was_chunk = False
        return super().plan()


class ForgetsMinTokens(Scheduler):
    def plan(self):
        plan = super().plan()
        return plan and replace(
            plan,
            samples=tuple(
                s._replace(is_early=False, suppressed_token_ids=()) for s in plan.samples
            ),
        )


QUICKLY_SEEN = [LeaksSequenceSlots, AdmitsOutOfOrder, DropsCopies, ForgetsMinTokens]
SEEN_LATE = [
    *(PreemptsTheOldest, KeepsCountAfterPreemption, OverfillsChunks),
    *(DrawsSamplesFromChunks, DrawsAGroupSeparate, NeverAlternates),
]


@pytest.mark.parametrize("mistaken", few(QUICKLY_SEEN + SEEN_LATE, QUICKLY_SEEN))
def test_the_state_machine_sees_planted_mistakes(mistaken):
    machine = mistaken_machine(Scheduling, mistaken)
    with pytest.raises((AssertionError, KeyError, CapacityError)):
        run_state_machine_as_test(
            machine, settings=settings(STATE_MACHINE, phases=[Phase.generate], max_examples=1500)
        )


class ForgetsWhatIsScored(RunningSet):
    """Scores all of the prompt once more after a preemption, after what was scored before."""

    def preempt_last(self, step):
        group = super().preempt_last(step)
        group.prompt_logprobs = (
            group.prompt_logprobs[:1] if group.num_unscored else group.prompt_logprobs
        )
        return group


class ReadsWhatIsNotScored(RunningSet):
    """Asks for what is cached of the whole prompt, as a request without scores does."""

    def _give_blocks(self, group, step):
        request = group.request
        group.request = replace(request, params=replace(request.params, prompt_logprobs=None))
        try:
            return super()._give_blocks(group, step)
        finally:
            group.request = request


@pytest.mark.parametrize(
    ("machine", "mistaken"),
    few(
        [(Swapping, ForgetsWhatIsScored), (Caching, ReadsWhatIsNotScored)],
        [(Caching, ReadsWhatIsNotScored)],
    ),
)
def test_the_state_machine_sees_mistakes_of_scoring(machine, mistaken):
    machine = mistaken_machine(machine, mistaken)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            machine, settings=settings(STATE_MACHINE, phases=[Phase.generate], max_examples=1500)
        )


class LeavesDroppedBlocks(BlockManager):
    """Keeps the blocks of a beam that falls out."""

    def release(self, sequence_id):
        if len([i for i in self.sequence_ids if i not in self.pins]) < 3:
            super().release(sequence_id)


class SharesNothing(BlockManager):
    """Gives a fork blocks of its own, with nothing in them."""

    def fork(self, parent_id, child_id):
        if child_id < 0:
            return super().fork(parent_id, child_id)
        num_tokens = len(self.block_tables(parent_id)[0]) * self.block_size
        return self.reserve(child_id, 0, num_tokens) and None


class SwapsWhatIsNotComputed(RunningSet):
    def _swap_out(self, group, step):
        trim, self.block_manager.trim = self.block_manager.trim, lambda *_: None
        try:
            return super()._swap_out(group, step)
        finally:
            del self.block_manager.trim
            assert self.block_manager.trim == trim


class ForgetsToSwapIn(Scheduler):
    def plan(self):
        plan = super().plan()
        return plan and replace(plan, swap_in=())


class RanksBackwards(RunningSet):
    def _run(self, group):
        self._running = {group.request.request_id: group, **self._running}


class LeaksHostBlocks(BlockTables):
    def swap_in(self, sequence_ids):
        moves = super().swap_in(sequence_ids)
        self.swapped.pool.allocate()
        return moves


class SwapsTheFirstGroupAlone(BlockManager):
    def swap_out(self, sequence_ids):
        moves = super().swap_out(sequence_ids)
        return tuple(move for move in moves if move[0] < self.groups[0].pool.num_blocks)


class SlidesTooFar(BlockTables):
    def num_passed(self, num_tokens):
        return (
            0
            if self.sliding_window is None
            else max(0, num_tokens - self.sliding_window + 1) // self.block_size
        )


class NeverSlides(BlockTables):
    def slide(self, sequence_id, num_tokens):
        pass


class PinsTooMuch(BlockManager):
    """Says of a pin that it holds a token more than was computed with its prompt."""

    def find_pinned(self, token_ids, salt):
        blocks, num_tokens = super().find_pinned(token_ids, salt)
        at_most = min(len(token_ids) - 1, len(blocks[0]) * self.block_size)
        return Prefix(blocks, min(num_tokens + 1, at_most))


class PinsForAll(BlockManager):
    def find_pinned(self, token_ids, salt):
        return super().find_pinned(token_ids, next((pin.salt for pin in self.pins.values()), None))


@pytest.mark.parametrize(
    ("machine", "mistaken"),
    [
        pytest.param(Swapping, SwapsWhatIsNotComputed, marks=pytest.mark.sweep),
        (Swapping, ForgetsToSwapIn),
        (Swapping, LeaksHostBlocks),
        (Swapping, SwapsTheFirstGroupAlone),
        (Searching, LeavesDroppedBlocks),
        (Searching, SharesNothing),
        (Scheduling, RanksBackwards),
        (Scheduling, SlidesTooFar),
        pytest.param(Scheduling, NeverSlides, marks=pytest.mark.sweep),
    ],
)
def test_the_state_machine_sees_mistakes_of_memory(machine, mistaken):
    machine = mistaken_machine(machine, mistaken)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError, CapacityError)):
        run_state_machine_as_test(
            machine, settings=settings(STATE_MACHINE, phases=[Phase.generate], max_examples=1500)
        )


@pytest.mark.parametrize("manager_class", [BlockManager, PinsTooMuch, PinsForAll])
def test_a_pin_is_found_by_its_tokens_and_salt(manager_class):
    """The pin ends in the middle of a block, which each request that goes on from it copies first;
    the last token is never found.
    """
    driver = make_driver(block_size=4, manager_class=manager_class)
    prompt = [*range(10)]
    driver.scheduler.add(make_group("pinned", 0, prompt, max_tokens=4, ignore_eos=True))
    driver.step()
    driver.scheduler.pin(-1, "pinned")

    def others() -> None:
        cases = (
            ([*prompt, 30, 31], None, 10),
            (prompt, None, 9),
            ([*prompt[:9], 30, 31], None, 8),
            ([*prompt, 3], "salt", 0),
        )
        for number, (tokens, salt, num_found) in enumerate(cases, 1):
            group = make_group(
                str(number), number, tokens, max_tokens=4, ignore_eos=True, cache_salt=salt
            )
            driver.scheduler.add(group)
            driver.run()
            assert group.num_cached_tokens == num_found
            copied = [source for source, _ in driver.plans[-4].copies]
            assert copied == ([3] if num_found in (9, 10) else [])
            assert group.sequences[0].output_token_ids == alone(group.request)

    if manager_class is BlockManager:
        others()
        driver.scheduler.block_manager.unpin(-1)
        assert driver.scheduler.block_manager.groups[0].pool.num_free == 64
    else:
        with pytest.raises(AssertionError):
            others()


def test_a_pin_that_has_slid_is_not_found_by_who_needs_what_it_gave_up():
    """There is a window of 3 in blocks of 4.

    After 14 tokens the pin has no block 0 to 1 any more; after 8 that are shared block 1 is read.
    """
    driver = make_driver(block_size=4, windows=(3,), num_blocks=20)
    scheduler, manager = driver.scheduler, driver.scheduler.block_manager
    prompt = [*range(14)]
    scheduler.add(make_group("pinned", 0, prompt, max_tokens=6, ignore_eos=True))
    while scheduler.running == () or scheduler.running[0].sequences[0].num_computed_tokens < len(
        prompt
    ):
        driver.step()
    scheduler.pin(-1, "pinned")
    for tables in manager.groups:
        tables.slide(-1, len(prompt))
    num_passed = manager.block_tables(-1)[0].count(0)
    assert num_passed == 2
    for shared in range(1, len(prompt)):
        pin = manager.find_pinned([*prompt[:shared], 39, 39], None)
        assert 0 not in pin.blocks[0][manager.groups[0].num_passed(pin.num_tokens) :]
        assert (pin.num_tokens > 0) == (manager.groups[0].num_passed(shared // 4 * 4) >= num_passed)


def test_what_fits_only_after_its_pin_begins_there():
    """More of the prompt is cached, in blocks of its own: reviving those takes blocks that are not
    there.
    """
    driver = make_driver(block_size=4, num_blocks=9, caching=True)
    scheduler, manager, pool = (
        driver.scheduler,
        driver.scheduler.block_manager,
        driver.scheduler.block_manager.groups[0].pool,
    )
    prompt = [*range(13)]
    scheduler.add(make_group("pinned", 0, prompt[:8], max_tokens=4, ignore_eos=True))
    driver.step()
    scheduler.pin(-1, "pinned")  # 2 blocks
    manager.forget_cached()
    with pytest.raises(
        CapacityError, match="may need 7 KV blocks .* the pool has 8, of which 2 are"
    ):
        scheduler.add(make_group("long", 9, prompt, max_tokens=24, ignore_eos=True))
    scheduler.add(make_group("scored", 1, prompt, max_tokens=1, ignore_eos=True, prompt_logprobs=0))
    driver.run()  # computes all of it again: 3 blocks are cached
    scheduler.add(make_group("running", 2, [30], max_tokens=9, ignore_eos=True))
    driver.step()
    assert (pool.num_free, pool.num_cached) == (5, 3)
    scheduler.add(make_group("other", 3, [33, 34, 35, 36, 33], max_tokens=9, ignore_eos=True))
    driver.step()
    driver.step()
    assert (pool.num_free, pool.num_cached) == (3, 3)
    group = make_group("new", 4, prompt, max_tokens=4, ignore_eos=True)
    scheduler.add(group)
    hits = [hit.prefix.num_tokens for [hit] in beginnings(group, manager)]
    assert hits == [12, 8]
    for _ in range(2):
        driver.step()
    assert group.num_cached_tokens == 8
    driver.run()
    assert group.sequences[0].output_token_ids == alone(group.request)


def test_a_step_that_admits_preempts_nobody():
    """Two sequences are at the end of a block when a newcomer, cached but for its last token,
    leaves one block: the second waits.
    """
    driver = make_driver(block_size=4, num_blocks=6, caching=True)
    scheduler = driver.scheduler
    scheduler.add(make_group("before", 0, range(20, 25), max_tokens=1, ignore_eos=True))
    driver.run()
    for number in (1, 2):
        scheduler.add(
            make_group(str(number), number, [number, 3, 3], max_tokens=4, ignore_eos=True)
        )
    driver.step()
    driver.step()
    assert [group.unfinished[0].num_known_tokens for group in scheduler.running] == [5, 5]
    scheduler.add(make_group("new", 3, range(20, 25), max_tokens=2, ignore_eos=True))
    driver.step()
    assert scheduler.num_running == 3 and not driver.plans[-1].preempted
    assert {row.sequence_id for row in driver.plans[-1].rows} == {1, 3}
    driver.run()


@pytest.mark.parametrize("mixed", [False, True])
def test_a_prompt_that_was_found_decodes_before_the_next_gets_a_chunk(mixed):
    driver = make_driver(block_size=4, caching=True, mixed=mixed)
    scheduler = driver.scheduler
    scheduler.add(make_group("before", 0, range(9), max_tokens=1, ignore_eos=True))
    driver.run()
    scheduler.add(make_group("found", 1, range(9), max_tokens=2, ignore_eos=True))
    scheduler.add(make_group("new", 2, range(20, 28), max_tokens=1, ignore_eos=True))
    driver.step()
    assert [row.sequence_id for row in driver.plans[-1].rows] == [1]
    assert scheduler.num_running == 2
    driver.run()


def test_a_prompt_is_computed_in_chunks_within_the_budget():
    driver = make_driver(max_tokens=16)
    driver.scheduler.add(make_group("a", 0, range(40), max_tokens=2, ignore_eos=True))
    driver.run()
    assert query_lens(driver) == [[16], [16], [8], [1]]
    assert [plan.step_id for plan in driver.plans] == [1, 2, 3, 4]
    assert [len(plan.samples) for plan in driver.plans] == [0, 0, 1, 1]
    sample = driver.plans[2].samples[0]
    assert (sample.row, sample.offset, sample.position) == (0, 7, 40)


def test_sequence_slots_that_are_free_for_who_waits():
    driver = make_driver(max_tokens=64)
    scheduler = driver.scheduler
    assert not scheduler.has_sequence_slots, "nobody waits"
    for number in range(scheduler.max_num_seqs + 1):
        scheduler.add(make_group(str(number), number, range(2), max_tokens=12, ignore_eos=True))
    for _ in range(6):
        assert scheduler.has_sequence_slots == (scheduler.num_running < scheduler.max_num_seqs)
        driver.step()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.has_sequence_slots) == (
        scheduler.max_num_seqs,
        1,
        False,
    )
    driver.run()


def test_chunks_and_decoding_alternate_where_they_do_not_mix():
    driver = make_driver(max_tokens=16, mixed=False)
    driver.scheduler.add(make_group("a", 0, range(4), max_tokens=8, ignore_eos=True))
    driver.step()
    driver.scheduler.add(make_group("b", 1, range(40), max_tokens=2, ignore_eos=True))
    for _ in range(5):
        driver.step()
    assert query_lens(driver) == [[4], [1], [16], [1], [16], [1]]


def test_decoding_rows_come_first_where_steps_mix():
    driver = make_driver(max_tokens=16, mixed=True)
    driver.scheduler.add(make_group("a", 0, range(4), max_tokens=8, ignore_eos=True))
    driver.step()
    driver.scheduler.add(make_group("b", 1, range(40), max_tokens=3, ignore_eos=True))
    for _ in range(4):
        driver.step()
    assert query_lens(driver) == [[4], [1, 15], [1, 15], [1, 10], [1, 1]]


@pytest.mark.parametrize("mixed", [False, True])
def test_prompts_get_their_turn_beside_more_decoding_rows_than_a_chunk_step_holds(mixed):
    driver = make_driver(max_num_seqs=8, max_chunk_rows=2, max_tokens=8, mixed=mixed)
    for i in range(4):
        driver.scheduler.add(
            make_group(f"decoding {i}", i, range(2), max_tokens=40, ignore_eos=True)
        )
    for _ in range(8):
        driver.step()
    late = make_group("late", 9, range(20), max_tokens=2, ignore_eos=True)
    driver.scheduler.add(late)
    for _ in range(9):
        driver.step()
    assert late.finished and not driver.scheduler.running[0].finished


class CountsRowsAlone(Scheduler):
    def _has_room(self, step):
        return (
            step.num_tokens < self.limits.max_tokens and len(step.work) < self.limits.max_chunk_rows
        )


@pytest.mark.parametrize("scheduler_class", [Scheduler, CountsRowsAlone])
def test_a_step_has_no_more_draws_than_rows(scheduler_class):
    """Three samples draw from one row, so of the prompts beside it one may draw."""
    driver = make_driver(
        max_tokens=16, max_chunk_rows=4, mixed=True, scheduler_class=scheduler_class
    )
    group = make_group("a", 0, range(6), n=3, max_tokens=4, ignore_eos=True)
    group.child_ids = (1, 2)
    driver.scheduler.add(group)
    driver.step()
    for sequence_id in (3, 4, 5):
        driver.scheduler.add(make_group(str(sequence_id), sequence_id, range(2), ignore_eos=True))
    if scheduler_class is CountsRowsAlone:
        with pytest.raises(AssertionError):
            driver.step()
        return
    driver.step()
    assert query_lens(driver) == [[5], [1, 2]]
    draws = [
        (sample.row, sample.sequence_id, sample.sample_index) for sample in driver.plans[1].samples
    ]
    assert draws == [(0, 1, 1), (0, 2, 2), (0, 0, 0), (1, 3, 0)]
    driver.run()
    assert [s.output_token_ids for s in group.sequences] == [
        alone(group.request, index) for index in range(3)
    ]


def test_newest_give_way_and_come_back_in_order():
    driver = make_driver(num_blocks=7, block_size=2, max_tokens=32)
    groups = [make_group(str(i), i, range(3), max_tokens=8, ignore_eos=True) for i in range(3)]
    for group in groups:
        driver.scheduler.add(group)
    driver.run()
    preempted = [request_id for plan in driver.plans for request_id in plan.preempted]
    assert preempted and "0" not in preempted
    assert (
        driver.scheduler.num_preemptions["recompute"]
        == len(preempted)
        == sum(group.num_preemptions for group in groups)
    )
    assert all(group.sequences[0].output_token_ids == alone(group.request) for group in groups)


def test_nobody_overtakes_the_preempted():
    driver = make_driver(num_blocks=9, block_size=2, max_tokens=32)
    driver.scheduler.add(make_group("old", 0, range(4), max_tokens=12, ignore_eos=True))
    driver.scheduler.add(make_group("big", 1, range(8), max_tokens=8, ignore_eos=True))
    while not driver.plans or not driver.plans[-1].preempted:
        driver.step()
    assert driver.plans[-1].preempted == ("big",)
    driver.scheduler.add(make_group("small", 2, range(1), max_tokens=1, ignore_eos=True))
    driver.step()
    assert [group.request.request_id for group in driver.scheduler.waiting] == ["big", "small"]


def test_what_can_never_fit_is_refused_with_the_numbers():
    driver = make_driver(num_blocks=5, block_size=4, max_num_seqs=2)
    with pytest.raises(
        CapacityError,
        match=r"may need 5 KV blocks \(1 x 18 tokens in blocks of 4\); the pool has 4",
    ):
        driver.scheduler.add(make_group("long", 0, range(10), max_tokens=8))
    with pytest.raises(CapacityError, match="may need 6 KV blocks"):
        driver.scheduler.add(make_group("wide", 1, range(8), max_tokens=2, n=2))
    with pytest.raises(CapacityError, match="asks for 3 sequences at once; max_num_seqs is 2"):
        driver.scheduler.add(make_group("wider", 2, range(1), max_tokens=1, n=3))
    assert not driver.scheduler.has_unfinished
    driver.scheduler.add(
        make_group("just", 3, range(10), max_tokens=7, ignore_eos=True)
    )  # 16 computed, the 17th is drawn
    driver.run()


@pytest.mark.parametrize("num_prompt", [0, 5])
def test_a_prompt_has_a_token_and_leaves_room_for_one(num_prompt):
    driver = make_driver()
    group = make_group("a", 0, range(5), max_tokens=1)
    object.__setattr__(group.request, "prompt_token_ids", tuple(range(num_prompt)))
    object.__setattr__(group.request, "max_total_tokens", num_prompt)
    with pytest.raises(ValueError, match="room for one more"):
        driver.scheduler.add(group)


def test_an_id_is_used_once_at_a_time():
    driver = make_driver()
    driver.scheduler.add(make_group("a", 0, range(5)))
    with pytest.raises(ValueError, match="'a' exists already"):
        driver.scheduler.add(make_group("a", 1, range(5)))
    driver.run()
    driver.scheduler.add(make_group("a", 2, range(5)))


def test_abort_gives_the_blocks_back_at_once_even_while_a_step_is_under_way():
    driver = make_driver()
    scheduler = driver.scheduler
    for i in range(2):
        scheduler.add(make_group(str(i), i, range(5), ignore_eos=True))
    plan = scheduler.plan()
    assert plan is not None and len(plan.rows) == 2
    aborted = scheduler.abort("0")
    assert aborted is not None and aborted.sequences[0].finish_reason == "abort"
    assert set(scheduler.block_manager.sequence_ids) == {1}
    touched = scheduler.commit(plan, [Append(0, 3), Append(1, 4), Finish(0, "length")])
    assert [group.request.request_id for group in touched] == ["1"]
    assert aborted.sequences[0].output_token_ids == []
    scheduler.check()


def test_min_tokens_suppresses_every_token_that_would_end_the_sequence():
    driver = make_driver()
    group = make_group("a", 0, range(5), max_tokens=4, min_tokens=2, stop_token_ids=(3, 1))
    driver.scheduler.add(group)

    def go_on(_: SequenceGroup, sequence: Sequence, token_id: int) -> list[Edit]:
        return [Append(sequence.sequence_id, token_id)]

    for _ in range(3):
        driver.step(go_on)
    samples = [plan.samples[0] for plan in driver.plans]
    assert [(s.is_early, s.suppressed_token_ids) for s in samples] == [
        (True, (EOS,)),
        (True, (EOS,)),
        (False, ()),
    ]
    masked = processor_inputs_of(
        tuple(samples), {}, 3, vocab_size=NUM_TOKEN_IDS, context=16
    ).mask_RU
    assert [
        [i for i in range(NUM_TOKEN_IDS) if not mask[i // 32] >> i % 32 & 1] for mask in masked
    ] == [
        [1, 3, EOS],
        [1, 3, EOS],
        [],
    ]


@pytest.mark.parametrize(("min_tokens", "early"), [(0, [False, False]), (3, [True, False])])
def test_stop_ids_end_drafts_from_min_tokens_on(min_tokens, early):
    driver = make_driver()
    options = {"max_tokens": 4, "min_tokens": min_tokens, "stop_token_ids": (3, 1)}
    group = make_group("a", 0, range(5), **options)
    driver.scheduler.add(group)
    driver.step(lambda _, sequence, token_id: [Append(sequence.sequence_id, token_id)])
    (sample,) = driver.plans[0].samples
    samples = make_draft_samples(sample, chain((7, 8)), group.sequences[0], group.request)
    assert [sample.is_early for sample in samples] == early


def test_edits_change_sequences():
    driver = make_driver()
    driver.scheduler.add(make_group("a", 0, range(5), n=3, max_tokens=8, ignore_eos=True))
    first = TokenLogprobs(token_id=9, logprob=-0.5, rank=1)

    def begin(*_: object) -> list[Edit]:
        return [Append(0, 9, "nine", first), Fork(0, 100, 1), Fork(0, 101, 2)]

    (group,) = driver.step(begin)
    twin = group.sequences[1]
    assert (twin.token_ids, twin.text, twin.logprobs, twin.cumulative_logprob) == (
        [*range(5), 9],
        "nine",
        [first],
        -0.5,
    )
    assert driver.scheduler.usage().shared_blocks == 2

    def go_on(_: SequenceGroup, sequence: Sequence, __: int) -> list[Edit]:
        if sequence.sequence_id == 0:
            return [Append(0, 3, "three", first), Finish(0, "stop", 3, "!")]
        if sequence.sequence_id == 100:
            return [Drop(100)]
        return [Append(sequence.sequence_id, 4)]

    driver.step(go_on)
    assert [s.sequence_id for s in group.sequences] == [0, 101]
    ended = group.sequences[0]
    assert (ended.text, ended.finish_reason, ended.stop_reason) == ("ninethree!", "stop", 3)
    assert set(driver.scheduler.block_manager.sequence_ids) == {101}
    assert (ended.logprobs, ended.cumulative_logprob) == ([first, first], -1.0)
    assert (group.sequences[1].text, group.sequences[1].logprobs) == ("nine", [first])
    assert group.sequences[1].token_ids == [*range(5), 9, 4]


def test_a_draw_of_another_step_is_refused():
    driver = make_driver()
    driver.scheduler.add(make_group("a", 0, range(5)))
    plan = driver.scheduler.plan()
    assert plan is not None
    driver.scheduler.commit(plan, [Append(0, 3)])
    with pytest.raises(AssertionError, match="out of turn"):
        driver.scheduler.commit(plan, [Append(0, 3)])


def test_a_decoding_row_carries_one_token_and_the_same_table_until_it_grows():
    driver = make_driver(block_size=4)
    driver.scheduler.add(make_group("a", 0, range(9), max_tokens=8, ignore_eos=True))
    driver.run()
    rows = [plan.rows[0] for plan in driver.plans]
    assert all(len(row.token_ids) == 1 for row in rows[1:])
    tables = [row.block_tables[0] for row in rows]
    assert [later is earlier for earlier, later in itertools.pairwise(tables)] == [True] * 3 + [
        False
    ] + [True] * 3


def test_the_split_of_a_running_prompt():
    driver = make_driver(num_blocks=11, block_size=4, max_tokens=6)
    driver.scheduler.add(make_group("a", 0, range(10), max_tokens=4, ignore_eos=True))
    driver.step()
    split = driver.scheduler.usage()
    assert (
        split.token_slots,
        split.reserved_slots,
        split.internal_fragmentation_slots,
        split.free_slots,
    ) == (
        6,
        4,
        2,
        28,
    )


def test_limits_are_positive_and_rows_hold_the_sequences():
    with pytest.raises(ValueError, match="max_tokens=0"):
        StepLimits(4, 0, 4, mixed=False)
    manager = BlockManager([BlockTables(BlockPool(4), 4)])
    for max_num_seqs in (0, 5):
        with pytest.raises(ValueError, match=f"max_num_seqs={max_num_seqs}"):
            Scheduler(StepLimits(4, 8, 4, mixed=False), manager, max_num_seqs=max_num_seqs)


def test_admission_leaves_a_reserve_free_while_others_run():
    """If every block were taken, the next token of the older request would preempt the newcomer at
    once.
    """
    driver = make_driver(num_blocks=7, block_size=4, max_tokens=32)
    driver.scheduler.add(make_group("old", 0, range(12), max_tokens=8, ignore_eos=True))
    driver.scheduler.add(
        make_group("new", 1, range(12), max_tokens=2, ignore_eos=True)
    )  # would take the three that are left
    driver.step()
    assert (
        driver.scheduler.num_running,
        driver.scheduler.block_manager.groups[0].pool.num_free,
    ) == (1, 3)
    driver.run()
    assert sum(driver.scheduler.num_preemptions.values()) == 0
