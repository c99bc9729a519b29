"""The simulator against sums by hand, conservation laws and the paper's numbers; and that a long
queue costs a step nothing.
"""

from __future__ import annotations

import gc
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from jaxpage.errors import CapacityError
from jaxpage.scheduling import Scheduler
from jaxpage.simulation.accounting import Run, State, TimeAverage
from jaxpage.simulation.costs import A100_OPT_13B, AnalyticCost
from jaxpage.simulation.policies import PagedScheduler
from jaxpage.simulation.setup import Setup
from jaxpage.simulation.simulator import Simulator
from jaxpage.simulation.traces import Arrival, poisson_trace
from jaxpage.step.plan import StepPlan
from tests.support.sweeps import few
from tools.lab.scheduler_lab.host_time import Decoding, Queue
from tools.lab.scheduler_lab.pressure import press, requests_at_once
from tools.lab.scheduler_lab.saturation import saturate

# A step takes a second, whatever it does; a block takes a hundred to swap.
ONE_SECOND = AnalyticCost(
    step=1.0,
    sequence=0,
    weights=0,
    token=0,
    context_token=0,
    copies_per_block=10,
    copy=10,
    copied_token=0,
)
SMALL = Setup(num_blocks=40, block_size=4, max_num_seqs=8, max_num_batched_tokens=32)


class Recorded(TimeAverage):
    """Keeps every state with its time."""

    def __init__(self, start: float = 0.0, stop: float = float("inf")) -> None:
        super().__init__(start, stop)
        self.states: list[tuple[float, float, State]] = []

    def add(self, state: State, begin: float, end: float) -> None:
        super().add(state, begin, end)
        self.states.append((begin, end, state))


def small_trace(seed: int = 0, num_samples: int = 1, rate: float = 0.2) -> list[Arrival]:
    """Returns a trace of more than the small setup can take at once.

    Requests are of up to 60 tokens, and a step takes a second.
    """
    return poisson_trace(
        "sharegpt",
        rate=rate,
        seconds=300,
        seed=seed,
        num_samples=num_samples,
        max_input=30,
        max_total=60,
    )


def simulate(trace: list[Arrival], setup: Setup = SMALL, average: TimeAverage | None = None) -> Run:
    simulator = Simulator(trace, setup.new_scheduler(), ONE_SECOND, average=average)
    run = simulator.run()
    simulator.scheduler.check()
    pool = simulator.scheduler.block_manager.groups[0].pool
    assert not simulator.scheduler.has_unfinished and pool.num_free == pool.num_usable
    return run


def test_one_request_takes_the_sum_by_hand():
    """Each of the three steps takes 13 ms + 0.2 ms + 19.7 ms of weights.

    Contexts are of 100, 101 and 102 tokens, at 0.75 µs.
    """
    run = Simulator([Arrival(5.0, 100, 3)], Setup().new_scheduler(), A100_OPT_13B).run()
    [served] = run.served.values()
    assert served.first_token == pytest.approx(5.0 + 0.0329 + 100 * 0.75e-6, abs=1e-12)
    assert served.latency == pytest.approx(0.0987 + 303 * 0.75e-6, abs=1e-12)
    assert served.normalized_latency == pytest.approx(0.09892725 / 3, abs=1e-12)
    assert run.num_steps == 3 and run.seconds == served.finished
    assert run.max_step_seconds == pytest.approx(0.0329 + 102 * 0.75e-6, abs=1e-12)


def test_a_long_prompt_is_bound_by_arithmetic():
    run = Simulator([Arrival(0.0, 1000, 1)], Setup().new_scheduler(), A100_OPT_13B).run()
    assert run.seconds == pytest.approx(0.013 + 0.0002 + 1000 * 0.12e-3 + 1000 * 0.75e-6, abs=1e-12)


def test_memory_is_averaged_over_time():
    """A prompt of 10 runs in chunks of 8 tokens and blocks of 4, then two more tokens come, after a
    pause of 6 s.
    """
    setup = replace(SMALL, num_blocks=5, max_num_seqs=2, max_num_batched_tokens=8)
    average = Recorded()
    run = simulate([Arrival(6.0, 10, 3)], setup, average)
    assert [(begin, end) for begin, end, _ in average.states] == [
        (0, 6),
        (6, 7),
        (7, 8),
        (8, 9),
        (9, 10),
    ]
    slots = [
        (s.token_slots, s.reserved_slots, s.internal_slots, s.free_slots, s.running)
        for _, _, s in average.states
    ]
    assert slots[0] == (0, 0, 0, 20, 0)
    assert slots[1][0] == 8 and slots[1][0] + slots[1][1] == 10, (
        "two tokens of the prompt are still to come"
    )
    assert slots[2:] == [(10, 0, 2, 8, 1), (11, 0, 1, 8, 1), (12, 0, 0, 8, 1)]
    assert run.mean.token_slots == pytest.approx((8 + 10 + 11 + 12) / 10)
    assert run.mean.running == pytest.approx(0.4)
    assert run.mean.pool_waste == pytest.approx(1 - 41 / 200)


def test_only_what_lies_in_the_window_counts():
    average = Recorded(6.5, 8.25)
    run = simulate(
        [Arrival(6.0, 10, 3)], replace(SMALL, num_blocks=5, max_num_batched_tokens=8), average
    )
    assert [(begin, end) for begin, end, _ in average.states] == [(6, 7), (7, 8), (8, 9)]
    assert average.seconds == 1.75
    assert run.mean.token_slots == pytest.approx((0.5 * 8 + 1.0 * 10 + 0.25 * 11) / 1.75)
    with pytest.raises(ValueError, match="nothing happened between 100 and 200 s"):
        TimeAverage(100, 200).mean()


@pytest.mark.parametrize(
    ("prefix_caching", "num_samples"),
    few(itertools.product([False, True], [1, 3]), [(False, 1), (True, 3)]),
)
def test_every_request_finishes_with_its_length(num_samples, prefix_caching):
    trace, average = small_trace(num_samples=num_samples), Recorded()
    setup = replace(
        SMALL, num_blocks=46, max_num_seqs=8 * num_samples, prefix_caching=prefix_caching
    )
    run = simulate(trace, setup, average)
    assert run.num_preemptions > 0, "this trace is to be too much for the pool"
    served = [run.served[str(ordinal)] for ordinal in range(len(trace))]
    assert [item.arrival for item in served] == trace
    assert [item.num_output_tokens for item in served] == [
        (a.num_output_tokens,) * num_samples for a in trace
    ]
    assert sum(item.num_preemptions for item in served) == run.num_preemptions
    assert {state.num_slots for _, _, state in average.states} == {46 * 4}
    for _, _, state in average.states:
        assert (
            min(state.token_slots, state.reserved_slots, state.internal_slots, state.free_slots)
            >= 0
        )


def test_littles_law():
    """Requests in the system, integrated over time, are the sum of the latencies, but for the rest
    of the step in which one comes.
    """
    trace = small_trace(rate=0.05)
    run = simulate(trace)
    integral = (run.mean.running + run.mean.waiting) * run.seconds
    latencies = sum(served.latency for served in run.served.values())
    assert integral <= latencies <= integral + len(trace) * run.max_step_seconds
    assert run.mean.running + run.mean.waiting > 0.3, "it is no empty statement"


def test_a_run_is_a_function_of_its_seed():
    runs = [simulate(small_trace(seed)) for seed in (3, 3, 4)]
    facts = [(run.mean, run.served, run.seconds) for run in runs]
    assert facts[0] == facts[1] != facts[2]


def test_what_can_never_run_is_refused():
    with pytest.raises(CapacityError, match="may need 43 KV blocks"):
        simulate([Arrival(0.0, 160, 10)])


def test_swapping_takes_its_time():
    class Swaps(PagedScheduler):
        """Says of its second step that it swaps."""

        def plan(self) -> StepPlan | None:
            plan = super().plan()
            if plan is None or plan.step_id != 2:
                return plan
            return replace(plan, swap_out=((1, 1), (2, 2), (3, 3)), swap_in=((4, 4),))

    plain = SMALL.new_scheduler()
    scheduler = Swaps(plain.limits, plain.block_manager, max_num_seqs=8)
    run = Simulator([Arrival(0.0, 10, 3)], scheduler, ONE_SECOND).run()
    assert (run.num_swapped_out, run.num_swapped_in, run.swap_seconds) == (3, 1, 400.0)
    assert run.seconds == 3 + 400 and run.max_step_seconds == 401


def test_swapping_costs_what_the_paper_measured():
    """Figure 19a has, one way, for the 310 tokens of a request, about 65 ms in blocks of 1 and
    about 10 ms in blocks of 256.
    """
    assert A100_OPT_13B.swap_seconds(310, 1) == pytest.approx(0.065, rel=0.05)
    assert A100_OPT_13B.swap_seconds(1, 256) * 310 / 256 == pytest.approx(0.010, rel=0.1)


def test_arrivals_are_a_poisson_process():
    trace = poisson_trace("sharegpt", rate=2.0, seconds=5000, seed=1)
    times = np.array([arrival.seconds for arrival in trace])
    gaps = np.diff(times)
    assert len(trace) == pytest.approx(10_000, abs=400)  # four standard deviations
    assert gaps.min() >= 0 and times[0] >= 0 and times[-1] <= 5000
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.04
    totals = [arrival.num_prompt_tokens + arrival.num_output_tokens for arrival in trace]
    assert max(totals) <= 2048 and max(arrival.num_prompt_tokens for arrival in trace) == 1024
    assert np.mean([arrival.num_output_tokens for arrival in trace]) == pytest.approx(338, rel=0.03)


def saturate_pool() -> State:
    result = saturate(Setup().new_scheduler, "sharegpt", rate=4.0, seconds=120.0, seeds=[0])
    return result.runs[0].mean


def test_less_than_four_percent_of_the_pool_is_wasted_at_saturation():
    """The paper claims so (96.3 % in its figure 2).

    A request of any length leaves half a block unfilled on average.
    """
    mean = saturate_pool()
    assert mean.waiting > 10, "the machine is to be saturated"
    assert mean.pool_waste < 0.04
    assert mean.allocated_waste < 0.02
    assert mean.internal_slots / mean.running == pytest.approx((16 - 1) / 2, abs=0.5)
    assert mean.running == pytest.approx(30.42, rel=0.15), "figure 13"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_pool_of_thirty_percent_of_the_demand_finishes_everything(mode):
    requests = requests_at_once("sharegpt", 40)
    result = press(requests, 0.3, mode)
    run, lengths = result.run, [a.num_prompt_tokens + a.num_output_tokens - 1 for a in requests]
    assert result.num_blocks == int(0.3 * sum(math.ceil(length / 16) for length in lengths))
    served = [run.served[str(ordinal)] for ordinal in range(40)]
    assert [item.num_output_tokens for item in served] == [(a.num_output_tokens,) for a in requests]
    assert run.num_preemptions > 0
    assert (run.num_swapped_out > 0) == (
        mode == "swap"
    ) and run.num_swapped_out == run.num_swapped_in
    assert run.swap_seconds == pytest.approx(
        2 * run.num_swapped_out * 80 * (2.2e-6 + 16 * 10240 / 25e9)
    )


def test_a_larger_watermark_is_seen_as_waste(monkeypatch):
    monkeypatch.setattr("jaxpage.scheduling.admitting.WATERMARK", 0.1)
    assert saturate_pool().pool_waste > 0.04


def calls(function: Callable[[], object]) -> Counter[str]:
    """Returns How often each function is called, those in C included."""
    counts: Counter[str] = Counter()

    def note(frame: object, event: str, argument: object) -> None:
        if event == "call":
            counts[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            counts[argument.__qualname__] += 1

    gc.disable()  # libraries have callbacks for collections, which come when they come
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts


def calls_with(
    num_waiting: int, plan: Callable[[Scheduler], StepPlan | None]
) -> list[Counter[str]]:
    """Counts the calls of a step, an arrival, an end and an admission, while requests wait."""
    decoding = Decoding(8, 20, prefix_caching=True)
    scheduler, requests = decoding.scheduler, decoding.requests
    queue = Queue(decoding, num_waiting)

    def step() -> StepPlan:
        made = plan(scheduler)
        assert made is not None
        scheduler.commit(made, requests.edits(made))
        return made

    step()  # whatever happens only once
    newcomer = decoding.new_waiting()
    counted = [calls(step), calls(lambda: scheduler.add(newcomer)), calls(queue.abort_one)]
    # who needs the whole pool; whoever is behind fits
    scheduler.abort(scheduler.waiting[0].request.request_id)
    counted.append(calls(step))
    assert scheduler.num_running == 9, "one was admitted"
    return counted


def assert_flat(plan: Callable[[Scheduler], StepPlan | None]) -> None:
    few, many = calls_with(100, plan), calls_with(10_000, plan)
    assert few == many
    walks = {name for counted in many for name in counted if name.endswith("__iter__")}
    assert not walks, "a walk in C is one call, however long"


def test_a_step_costs_the_same_however_many_wait():
    assert_flat(Scheduler.plan)


def test_a_walk_along_the_queue_is_seen():
    def counts(scheduler: Scheduler) -> StepPlan | None:
        assert all(not group.finished for group in scheduler.waiting)
        return scheduler.plan()

    def copies(scheduler: Scheduler) -> StepPlan | None:
        assert len(scheduler.waiting) == scheduler.num_waiting
        return scheduler.plan()

    for walks in (counts, copies):
        with pytest.raises(AssertionError):
            assert_flat(walks)
