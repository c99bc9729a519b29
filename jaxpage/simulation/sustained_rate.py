"""The highest request rate at which nearly all requests keep an SLO, by the engine's scheduler on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from jaxpage.simulation.accounting import Run, Served
from jaxpage.simulation.costs import CostModel
from jaxpage.simulation.policies import Policy
from jaxpage.simulation.simulator import Simulator
from jaxpage.simulation.traces import LENGTHS, Arrival

SUSTAINED = 0.99  # of the requests must keep the SLO
NUM_REQUESTS, SEEDS = 300, (0, 1, 2)
PRECISION = 1.05  # ratio of the rates between which the highest lies
LOWEST, HIGHEST = 1e-2, 1e5  # rates to look between
LOOK_EVERY = 8  # steps


@dataclass(frozen=True)
class Question:
    """A configuration on a machine, the requests that it gets, and what they must keep: seconds by `ttft`, `tpot` and `e2el`."""

    new_scheduler: Callable[[], Policy]
    cost: CostModel
    slo: Mapping[str, float]
    dataset: str
    max_input: int
    max_output: int
    num_requests: int = NUM_REQUESTS


@dataclass(frozen=True)
class AtRate:
    """All seeds at one rate. Seconds."""

    rate: float  # requests per second
    kept: float  # share of the requests that keep the SLO
    p99_ttft: float
    p99_tpot: float
    running: float  # requests, in the mean
    pool_in_use: float  # 0 to 1, in the mean
    num_preemptions: int

    @property
    def is_sustained(self) -> bool:
        return self.kept >= SUSTAINED


def at_rate(question: Question, rate: float, seeds: Sequence[int] = SEEDS) -> AtRate:
    """Raises CapacityError if a request could never run."""
    runs = [_run(question, rate, seed) for seed in seeds]
    served = [latencies(each) for run in runs for each in run.served.values()]
    kept = [all(each[name] <= most for name, most in question.slo.items()) for each in served]
    means = [run.mean for run in runs]
    ttft, tpot = (
        float(np.percentile([each[name] for each in served], 99)) for name in ("ttft", "tpot")
    )
    return AtRate(
        rate,
        fmean(kept),
        ttft,
        tpot,
        fmean(mean.running for mean in means),
        fmean(1 - mean.free_slots / mean.num_slots for mean in means),
        sum(run.num_preemptions for run in runs),
    )


def highest_rate(question: Question, seeds: Sequence[int] = SEEDS, *, near: float = 1.0) -> AtRate:
    """Between two rates that are `PRECISION` apart, the lower, which is sustained; the lowest of all if not even
    that is. near: where to look first."""
    low, found = near, at_rate(question, near, seeds)
    while not found.is_sustained:
        if (low := low / 2) < LOWEST:
            return found
        found = at_rate(question, low, seeds)
    high = 2 * low
    while (higher := at_rate(question, high, seeds)).is_sustained and high < HIGHEST:
        low, high, found = high, 2 * high, higher
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        between = at_rate(question, middle, seeds)
        if between.is_sustained:
            low, found = middle, between
        else:
            high = middle
    return found


def _run(question: Question, rate: float, seed: int) -> Run:
    draw = np.random.default_rng(seed)
    times = np.cumsum(draw.exponential(1 / rate, question.num_requests))
    lengths = LENGTHS[question.dataset](
        draw, question.num_requests, question.max_input, question.max_output
    )
    trace = [
        Arrival(*values)
        for values in zip(times.tolist(), *(each.tolist() for each in lengths), strict=True)
    ]
    return Simulator(trace, question.new_scheduler(), question.cost, look_every=LOOK_EVERY).run()


def latencies(served: Served) -> dict[str, float]:
    """As `bench serve` defines them."""
    others = max(1, served.arrival.num_output_tokens - 1)
    return {
        "ttft": served.first_token - served.arrival.seconds,
        "tpot": (served.finished - served.first_token) / others,
        "e2el": served.latency,
    }
