"""Finds the highest request rate at which nearly all requests keep an SLO, on a virtual clock."""

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

SUSTAINED = 0.99  # the share of requests that must keep the SLO
NUM_REQUESTS = 300
SEEDS = (0, 1, 2)
PRECISION = 1.05  # the search ends when its two rates have this ratio
# The bounds of the search, in requests per second.
LOWEST = 1e-2
HIGHEST = 1e5
SAMPLE_EVERY = 8  # steps between two looks at the memory


@dataclass(frozen=True)
class Question:
    """Holds a configuration on a machine, its requests, and the SLO that they must keep.

    Attributes:
        new_scheduler: Makes the scheduler of the configuration.
        cost: The cost model of the machine.
        slo: The most seconds for any of `ttft`, `tpot` and `e2el`.
        dataset: The distribution of lengths, a key of `LENGTHS`.
        max_input: The longest prompt in tokens.
        max_output: The longest output in tokens.
        num_requests: The requests of a run.
    """

    new_scheduler: Callable[[], Policy]
    cost: CostModel
    slo: Mapping[str, float]
    dataset: str
    max_input: int
    max_output: int
    num_requests: int = NUM_REQUESTS


@dataclass(frozen=True)
class AtRate:
    """Holds the results of all seeds at one rate, in seconds.

    Attributes:
        rate: The requests per second.
        share_within_slo: The share of the requests that keep the SLO.
        p99_ttft: The 99th percentile of the time to the first token.
        p99_tpot: The 99th percentile of the time per later token.
        running: The mean number of running requests.
        pool_in_use: The mean used share of the pool, 0 to 1.
        num_preemptions: The preemptions of all runs.
    """

    rate: float
    share_within_slo: float
    p99_ttft: float
    p99_tpot: float
    running: float
    pool_in_use: float
    num_preemptions: int

    @property
    def is_sustained(self) -> bool:
        """Returns whether nearly all requests keep the SLO."""
        return self.share_within_slo >= SUSTAINED


def at_rate(question: Question, rate: float, seeds: Sequence[int] = SEEDS) -> AtRate:
    """Returns the results of all seeds at one rate.

    Raises:
        CapacityError: A request could never run.
    """
    runs = [_run(question, rate, seed) for seed in seeds]
    served = [latencies(each) for run in runs for each in run.served.values()]
    holds = [
        all(each[name] <= maximum for name, maximum in question.slo.items()) for each in served
    ]
    means = [run.mean for run in runs]
    ttft, tpot = (
        float(np.percentile([each[name] for each in served], 99)) for name in ("ttft", "tpot")
    )
    return AtRate(
        rate,
        fmean(holds),
        ttft,
        tpot,
        fmean(mean.running for mean in means),
        fmean(1 - mean.free_slots / mean.num_slots for mean in means),
        sum(run.num_preemptions for run in runs),
    )


def highest_rate(question: Question, seeds: Sequence[int] = SEEDS, *, near: float = 1.0) -> AtRate:
    """Returns the results at the highest rate that is sustained, to within `PRECISION`.

    If not even the lowest rate is sustained, its results are returned.

    Args:
        question: The configuration, its requests and the SLO.
        seeds: The seeds of the runs at each rate.
        near: The rate at which the search begins.
    """
    low = near
    outcome = at_rate(question, near, seeds)
    while not outcome.is_sustained:
        if (low := low / 2) < LOWEST:
            return outcome
        outcome = at_rate(question, low, seeds)
    high = 2 * low
    while (higher := at_rate(question, high, seeds)).is_sustained and high < HIGHEST:
        low = high
        high = 2 * high
        outcome = higher
    while high / low > PRECISION:
        # The geometric mean, because the precision is a ratio.
        middle = (low * high) ** 0.5
        between = at_rate(question, middle, seeds)
        if between.is_sustained:
            low = middle
            outcome = between
        else:
            high = middle
    return outcome


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
    return Simulator(
        trace, question.new_scheduler(), question.cost, sample_every=SAMPLE_EVERY
    ).run()


def latencies(served: Served) -> dict[str, float]:
    """Returns the latencies of a request in seconds, as `bench serve` defines them."""
    others = max(1, served.arrival.num_output_tokens - 1)
    return {
        "ttft": served.first_token - served.arrival.seconds,
        "tpot": (served.finished - served.first_token) / others,
        "e2el": served.latency,
    }
