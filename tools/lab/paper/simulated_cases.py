"""Simulates one run of the paper's evaluation.

A case says which system serves which model, which requests come and how often.
"""

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
from tools.lab.paper.orca import Orca
from tools.lab.paper.pinned_prefix import pin_prefix
from tools.lab.paper.static_batching import StaticBatcher

PAGED, FASTER_TRANSFORMER = "jaxpage", "FasterTransformer"
ORCAS = {"Orca (Max)": "Max", "Orca (Pow2)": "Pow2", "Orca (Oracle)": "Oracle"}
SYSTEMS = (FASTER_TRANSFORMER, *ORCAS, PAGED)

MAX_NUM_SEQS = 1024  # so many that only memory limits a batch
WARM_UP = 0.25  # the share of the window that is not averaged: the pool fills up
SAMPLE_EVERY = 8  # steps between two samples of the memory


@dataclass(frozen=True)
class Machine:
    """A model on its GPUs: its slots for keys and values, and the cost of a step."""

    name: str
    num_slots: int
    cost: AnalyticCost


OPT_13B = Machine("OPT-13B", 15_728, A100_OPT_13B)
OPT_66B = Machine("OPT-66B", 9_696, A100_OPT_66B)
OPT_175B = Machine("OPT-175B", 60_096, A100_OPT_175B)
LLAMA_13B = replace(OPT_13B, name="LLaMA-13B")  # as many layers, and as wide


@dataclass(frozen=True)
class Workload:
    """Holds what the requests of a trace have in common."""

    dataset: str
    num_samples: int = 1  # the number of samples, or of beams
    is_beam_search: bool = False
    num_prefix_tokens: int = 0


@dataclass(frozen=True)
class Case:
    """A run without its rate.

    Requests arrive for `seconds`; requests that are unfinished then are counted as unfinished.
    """

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
    """Holds the results of a run."""

    rate: float  # requests per second
    normalized_latency: float  # seconds per token
    mean: State
    num_requests: int
    num_unfinished: int
    num_preemptions: int
    tokens_per_second: float  # the tokens of the requests that finished

    @classmethod
    def of(cls, rate: float, run: Run) -> Outcome:
        """Returns the results of a run at this rate."""
        num_unfinished = len(run.unfinished)
        counts = len(run.served) + num_unfinished, num_unfinished, run.num_preemptions
        num_tokens = sum(served.arrival.num_output_tokens for served in run.served.values())
        return cls(rate, run.normalized_latency, run.mean, *counts, num_tokens / run.seconds)


def new_policy(case: Case) -> Policy:
    """Returns the scheduler of the case's system."""
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
    """Simulates a case at one rate."""
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
        sample_every=SAMPLE_EVERY,
        ancestries=case.ancestries,
    )
    return Outcome.of(rate, simulator.run(case.seconds))


def run_curve(case: Case, rates: Sequence[float], limit: float) -> list[Outcome]:
    """Simulates rates in ascending order, up to the first at which the latency is above `limit`.

    The latency is normalised. Runs at higher rates take long and show nothing more.
    """
    outcomes: list[Outcome] = []
    for rate in rates:
        outcomes.append(run_case(case, rate))
        if outcomes[-1].normalized_latency > limit:
            break
    return outcomes
