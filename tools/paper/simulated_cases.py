"""One simulated run of the paper's evaluation: which system serves which model, which requests come and how often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxpage.scheduling import Preemption
from jaxpage.simulation.accounting import Run, State, TimeAverage
from jaxpage.simulation.beams import Ancestry
from jaxpage.simulation.costs import A100_OPT_13B, A100_OPT_66B, A100_OPT_175B, AnalyticCost
from jaxpage.simulation.policies import Policy
from jaxpage.simulation.setup import Setup
from jaxpage.simulation.simulator import Simulator
from jaxpage.simulation.traces import poisson_trace
from tools.paper.orca import Orca
from tools.paper.pinned_prefix import pin_prefix
from tools.paper.static_batching import StaticBatcher

PAGED, FASTER_TRANSFORMER = "jaxpage", "FasterTransformer"
ORCAS = {"Orca (Max)": "Max", "Orca (Pow2)": "Pow2", "Orca (Oracle)": "Oracle"}
SYSTEMS = (FASTER_TRANSFORMER, *ORCAS, PAGED)

MAX_NUM_SEQS = 1024  # so that memory is what bounds a batch
WARM_UP = 0.25  # share of the window that is not averaged: the pool fills up
LOOK_EVERY = 8  # steps


@dataclass(frozen=True)
class Machine:
    """A model on its GPUs: slots for keys and values, and what a step costs."""

    name: str
    num_slots: int
    cost: AnalyticCost


OPT_13B = Machine("OPT-13B", 15_728, A100_OPT_13B)
OPT_66B = Machine("OPT-66B", 9_696, A100_OPT_66B)
OPT_175B = Machine("OPT-175B", 60_096, A100_OPT_175B)
LLAMA_13B = replace(OPT_13B, name="LLaMA-13B")  # as many layers, as wide


@dataclass(frozen=True)
class Workload:
    """What the requests of a trace have in common."""

    dataset: str
    num_samples: int = 1  # or beams
    is_beam_search: bool = False
    num_prefix_tokens: int = 0


@dataclass(frozen=True)
class Case:
    """A run but for its rate. Arrivals come for `seconds`; what is unfinished then is counted as such."""

    system: str
    workload: Workload
    seconds: float
    seed: int
    machine: Machine = OPT_13B
    block_size: int = 16
    preemption: Preemption = field(default_factory=Preemption)
    ancestries: Mapping[int, Sequence[Ancestry]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a run comes to."""

    rate: float  # requests per second
    normalized_latency: float  # seconds per token
    mean: State
    num_requests: int
    num_unfinished: int
    num_preemptions: int
    tokens_per_second: float  # of the requests that finished

    @classmethod
    def of(cls, rate: float, run: Run) -> Outcome:
        num_unfinished = len(run.unfinished)
        counts = len(run.served) + num_unfinished, num_unfinished, run.num_preemptions
        num_tokens = sum(served.arrival.num_output_tokens for served in run.served.values())
        return cls(rate, run.normalized_latency, run.mean, *counts, num_tokens / run.seconds)


def new_policy(case: Case) -> Policy:
    num_slots = case.machine.num_slots
    if case.system in ORCAS:
        return Orca(num_slots, ORCAS[case.system], max_num_seqs=MAX_NUM_SEQS)
    if case.system == FASTER_TRANSFORMER:
        return StaticBatcher(num_slots, max_num_seqs=MAX_NUM_SEQS)
    assert case.system == PAGED
    setup = Setup(
        num_slots // case.block_size, case.block_size, MAX_NUM_SEQS, preemption=case.preemption
    )
    scheduler = setup.new_scheduler()
    if case.workload.num_prefix_tokens:
        pin_prefix(scheduler, case.workload.num_prefix_tokens)
    return scheduler


def run_case(case: Case, rate: float) -> Outcome:
    work = case.workload
    trace = poisson_trace(
        work.dataset,
        rate=rate,
        seconds=case.seconds,
        seed=case.seed,
        num_samples=work.num_samples,
        is_beam_search=work.is_beam_search,
        num_prefix_tokens=work.num_prefix_tokens,
    )
    average = TimeAverage(WARM_UP * case.seconds, case.seconds)
    simulator = Simulator(
        trace,
        new_policy(case),
        case.machine.cost,
        average=average,
        look_every=LOOK_EVERY,
        ancestries=case.ancestries,
    )
    return Outcome.of(rate, simulator.run(case.seconds))


def run_curve(case: Case, rates: Sequence[float], limit: float) -> list[Outcome]:
    """From low to high rates, up to the first at which the normalised latency is above `limit`: what lies beyond takes long and shows
    nothing."""
    outcomes: list[Outcome] = []
    for rate in rates:
        outcomes.append(run_case(case, rate))
        if outcomes[-1].normalized_latency > limit:
            break
    return outcomes
