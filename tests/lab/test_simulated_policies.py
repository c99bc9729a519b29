"""Says what the simulation compares the engine's scheduler with: the buddy allocator, Orca, static
batches, and beams that follow real ones.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpage import BeamSearchParams
from jaxpage.errors import CapacityError
from jaxpage.memory import BlockManager, BlockPool, BlockTables
from jaxpage.settings.sampling_params import SamplingParams
from jaxpage.simulation.accounting import Run, State, TimeAverage
from jaxpage.simulation.costs import AnalyticCost
from jaxpage.simulation.policies import PagedScheduler, Policy
from jaxpage.simulation.scripts import ScriptedRequests
from jaxpage.simulation.setup import Setup
from jaxpage.simulation.simulator import Simulator
from jaxpage.simulation.traces import Arrival, poisson_trace
from jaxpage.step.plan import StepPlan
from tests.support.engines import ENGINES, LLAMA, make_llm
from tests.support.random_checkpoints import random_checkpoint
from tools.lab.paper.buddy import BuddyAllocator
from tools.lab.paper.orca import RESERVATIONS, Orca
from tools.lab.paper.pinned_prefix import pin_prefix
from tools.lab.paper.sharing_figures import read_ancestries
from tools.lab.paper.static_batching import StaticBatcher

# A step takes a second, whatever it does, and so does a step that swaps.
ONE_SECOND = AnalyticCost(
    step=1.0,
    sequence=0,
    weights=0,
    token=0,
    context_token=0,
    copies_per_block=0,
    copy=0,
    copied_token=0,
)


class Naive:
    """The same rules over a map of slots: free chunks are the largest aligned powers of two that
    are free; found anew each time.
    """

    def __init__(self, num_slots: int) -> None:
        self.is_free = np.ones(num_slots, bool)
        self.sizes: dict[int, int] = {}

    def chunks(self) -> list[tuple[int, int]]:
        """Returns (size, first slot) of the free chunks."""
        blocks, left = [], self.is_free.copy()
        for order in reversed(range(len(left).bit_length())):
            size = 1 << order
            for start in range(0, len(left) - size + 1, size):
                if left[start : start + size].all():
                    blocks.append((size, start))
                    left[start : start + size] = False
        return blocks

    def allocate(self, num_slots: int) -> int | None:
        expected = 1
        while expected < num_slots:
            expected *= 2
        fitting = [chunk for chunk in self.chunks() if chunk[0] >= expected]
        if not fitting:
            return None
        _, start = min(fitting)
        self.is_free[start : start + expected] = False
        self.sizes[start] = expected
        return start

    def free(self, start: int) -> None:
        self.is_free[start : start + self.sizes.pop(start)] = True


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.lists(st.tuples(st.booleans(), st.integers(1, 70)), max_size=40))
def test_the_buddy_allocator_is_the_naive_one(
    num_slots: int, calls: list[tuple[bool, int]]
) -> None:
    buddy, naive = BuddyAllocator(num_slots), Naive(num_slots)
    for allocates, number in calls:
        if allocates:
            assert buddy.allocate(number) == naive.allocate(number)
        elif naive.sizes:
            start = sorted(naive.sizes)[number % len(naive.sizes)]
            buddy.free(start)
            naive.free(start)
        assert buddy.num_free == naive.is_free.sum()
    for start in list(naive.sizes):
        buddy.free(start)
    assert buddy.allocate(buddy.largest) == 0, "all are joined again"


def test_wrong_use_of_the_allocator_is_refused() -> None:
    with pytest.raises(ValueError, match="num_slots=0 must be at least 1"):
        BuddyAllocator(0)
    with pytest.raises(ValueError, match="num_slots=0 must be at least 1"):
        BuddyAllocator(8).allocate(0)
    with pytest.raises(KeyError):
        BuddyAllocator(8).free(0)


class Recorded(TimeAverage):
    """Keeps every state."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[State] = []

    def add(self, state: State, begin: float, end: float) -> None:
        super().add(state, begin, end)
        self.states.append(state)


def simulate(
    trace: list[Arrival], policy: Policy, average: TimeAverage | None = None, **options: object
) -> Run:
    run = Simulator(trace, policy, ONE_SECOND, average=average, **options).run()  # type: ignore[arg-type]
    assert not policy.has_unfinished and not run.unfinished
    return run


def test_requests_leave_orca_one_by_one_and_a_static_batch_together() -> None:
    """There are two places, and outputs of 3, 5 and 2 tokens: the third request takes the place of
    the first, or waits for both.
    """
    trace = [Arrival(0.0, 10, length) for length in (3, 5, 2)]
    orca = simulate(trace, Orca(4096, "Max"))
    assert [orca.served[name].finished for name in "012"] == [3, 5, 5]
    static = simulate(trace, StaticBatcher(4096))
    assert [static.served[name].finished for name in "012"] == [5, 5, 7]
    assert [static.served[name].first_token for name in "012"] == [1, 1, 6]


def test_who_has_ended_in_a_static_batch_still_costs() -> None:
    by_row = replace(ONE_SECOND, step=0.0, sequence=1.0)
    run = Simulator([Arrival(0.0, 10, 1), Arrival(0.0, 10, 4)], StaticBatcher(4096), by_row).run()
    assert run.seconds == 4 * 2


@pytest.mark.parametrize(
    ("variant", "requested"), [("Max", 2048), ("Pow2", 100 + 64), ("Oracle", 100 + 40)]
)
def test_what_orca_reserves(variant: str, requested: int) -> None:
    """In its middle step one request has 100 tokens of prompt and 40 of output, of which 20 have
    been drawn before.
    """
    average = Recorded()
    policy = Orca(15_728, variant)
    simulate([Arrival(0.0, 100, 40)], policy, average)
    state = average.states[20]
    assert (state.token_slots, state.reserved_slots) == (120, 20)
    assert (state.internal_slots, state.free_slots) == (requested - 140, 15_728 - requested)
    assert policy.allocator.num_free == 15_728


@pytest.mark.parametrize(("output", "rounded"), [(25, 32), (32, 32), (33, 64), (1, 1)])
def test_pow2_rounds_the_output_up(output: int, rounded: int) -> None:
    """25 to 32 is the paper's example."""
    assert (
        RESERVATIONS["Pow2"](ScriptedRequests().new_group(Arrival(0.0, 100, output)).request)
        == 100 + rounded
    )
    assert (
        RESERVATIONS["Pow2"](ScriptedRequests().new_group(Arrival(0.0, 1024, 700)).request) == 2048
    )


def test_orca_runs_as_many_as_the_allocator_has_room_for() -> None:
    """Seven chunks of 2,048 fit in 15,728 slots.

    Of those of 256, for 140 tokens in a row, 60 fit in 15,360 slots and one in the rest of 368.
    """
    for variant, maximum in (("Max", 7), ("Pow2", 61), ("Oracle", 61)):
        average = Recorded()
        simulate(
            [Arrival(0.0, 100, 40)] * 70,
            Orca(15_728, variant, max_num_batched_tokens=10_000),
            average,
        )
        assert max(state.running for state in average.states) == maximum


def test_samples_have_a_chunk_each_and_compute_the_prompt_once() -> None:
    average = Recorded()
    run = simulate([Arrival(0.0, 10, 5, num_samples=3)], Orca(64, "Oracle"), average)
    assert run.served["0"].num_output_tokens == (5, 5, 5) and run.seconds == 5
    assert [state.token_slots for state in average.states] == [10, 33, 36, 39, 42]
    with pytest.raises(CapacityError, match="reserves 4 x 20 slots at once; the pool has 64"):
        Orca(64, "Oracle").add(ScriptedRequests().new_group(Arrival(0.0, 10, 10, num_samples=4)))


def test_a_run_that_is_stopped_counts_who_is_unfinished() -> None:
    simulator = Simulator(
        [Arrival(0.0, 10, 3), Arrival(1.0, 10, 10)], Setup().new_scheduler(), ONE_SECOND
    )
    run = simulator.run(until=6.0)
    assert len(run.served) == len(run.unfinished) == 1 and run.seconds == 6.0
    assert run.normalized_latency == pytest.approx((3 / 3 + 5 / 10) / 2)


def test_requests_share_a_pinned_prefix() -> None:
    """40 tokens in blocks of 16: two full blocks are shared by all, the third is copied by each."""
    scheduler = Setup(num_blocks=20).new_scheduler()
    pin_prefix(scheduler, 40)
    average = Recorded()
    simulate([Arrival(0.0, 44, 6, num_prefix_tokens=40)] * 4, scheduler, average)
    state = average.states[0]
    assert (state.unshared_blocks, state.saved_blocks) == (12, 6)
    assert state.num_slots - state.free_slots == 16 * (3 + 4), (
        "the pin's own blocks, and a third one for each"
    )
    assert state.token_slots == 40 + 4 * (44 - 32)
    scheduler.check()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA)


def facts(plan: StepPlan) -> tuple[object, ...]:
    """Returns all of a plan but the tokens, which a simulation does not have."""
    rows = [(row.sequence_id, row.start, len(row.token_ids), row.block_tables) for row in plan.rows]
    samples = [
        (sample.row, sample.sequence_id, sample.sample_index, sample.position)
        for sample in plan.samples
    ]
    return rows, samples, plan.copies, plan.swap_out, plan.swap_in, plan.preempted


class Noted(PagedScheduler):
    """Keeps its plans."""

    def plan(self, *drafts: object) -> StepPlan | None:  # type: ignore[override]
        plan = super().plan()
        if plan is not None:
            self.__dict__.setdefault("plans", []).append(facts(plan))
        return plan


def same_trace() -> list[Arrival]:
    """Returns a trace of more than the pool of 16 blocks holds, at whole seconds.

    Every third request asks for three samples.
    """
    trace = poisson_trace("sharegpt", rate=0.12, seconds=200, seed=5, max_input=40, max_total=80)
    return [
        replace(
            arrival, seconds=float(int(arrival.seconds)), num_samples=3 if index % 3 == 2 else 1
        )
        for index, arrival in enumerate(trace)
    ]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_simulation_plans_what_an_engine_plans(checkpoint: Path, mode: str) -> None:
    """The same trace runs once with a model: each step has the same rows, draws, block tables,
    copies, swaps and preemptions.
    """
    trace, real = same_trace(), []
    with make_llm(checkpoint, **{**ENGINES[mode], "enable_prefix_caching": False}) as llm:
        engine = llm._engine
        waiting, plan = list(enumerate(trace)), engine.scheduler.plan
        engine.scheduler.plan = lambda drafts: (
            (made := plan(drafts)) and (real.append(facts(made)) or made)
        )
        while waiting or engine.has_unfinished:
            now = len(real) if engine.has_unfinished else max(len(real), waiting[0][1].seconds)
            while waiting and waiting[0][1].seconds <= now:
                index, arrival = waiting.pop(0)
                params = SamplingParams(
                    n=arrival.num_samples, max_tokens=arrival.num_output_tokens, ignore_eos=True
                )
                token_ids = [
                    1 + (index + number) % 200 for number in range(arrival.num_prompt_tokens)
                ]
                engine.add(str(index), engine.prepare(None, token_ids, params))
            engine.step()
        scheduler = engine.scheduler
        num_blocks = scheduler.block_manager.groups[0].pool.num_blocks
        manager = BlockManager(
            [BlockTables(BlockPool(num_blocks), 16, host_pool=BlockPool(num_blocks))]
        )
        simulated = Noted(
            scheduler.limits,
            manager,
            max_num_seqs=scheduler.max_num_seqs,
            preemption=scheduler._requests._preemption,
        )
        simulate(trace, simulated)
    assert simulated.plans == real
    assert any(preempted for *_, preempted in real) and any(copies for _, _, copies, *_ in real)
    assert any(swap_out for *_, swap_out, _, _ in real) == (mode == "swap")


def test_simulated_beams_share_what_the_real_ones_shared(checkpoint: Path, tmp_path: Path) -> None:
    """An engine runs one search of three beams alone, and a simulation runs it again by the
    ancestry in its event log.
    """
    log, num_prompt, num_output = tmp_path / "log.jsonl", 20, 60
    with make_llm(checkpoint, enable_prefix_caching=False, event_log=str(log)) as llm:
        params = BeamSearchParams(3, max_tokens=num_output, ignore_eos=True)
        llm.generate([list(range(1, num_prompt + 1))], [params], use_tqdm=False)
        samples = [sample.split for sample in llm.memory_report().samples]
    ancestries = read_ancestries(log)
    assert [len(steps) for steps in ancestries[3]] == [num_output - 2], (
        "not of the first step, nor of the last"
    )
    assert any(steps for steps in ancestries[3][0]), json.dumps(ancestries)
    average = Recorded()
    beams = Arrival(0.0, num_prompt, num_output, num_samples=3, is_beam_search=True)
    run = simulate([beams], Setup().new_scheduler(), average, ancestries=ancestries)
    assert run.served["0"].num_output_tokens == (num_output,) * 3
    ours = [(state.saved_blocks, state.unshared_blocks) for state in average.states]
    theirs = [(split.saved_blocks, split.unshared_blocks) for split in samples]
    assert ours[-(num_output - 1) :] == theirs[-(num_output - 1) :]
