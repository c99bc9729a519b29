"""Measures how full the pool is when more requests come than the machine can serve.

This is the experiment of the paper's figure 2, for this scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from jaxpage.simulation.accounting import Run, TimeAverage
from jaxpage.simulation.costs import A100_OPT_13B, CostModel
from jaxpage.simulation.policies import Policy
from jaxpage.simulation.simulator import Simulator
from jaxpage.simulation.traces import poisson_trace

WARM_UP = 0.25  # the share of the trace that is not averaged: the pool fills up
SAMPLE_EVERY = 8  # steps between two samples of the memory


@dataclass(frozen=True)
class Saturation:
    """Holds the runs of one rate, one for each seed."""

    dataset: str
    rate: float  # requests per second
    seconds: float  # the length of the traces
    runs: Sequence[Run]

    def over_seeds(self, measure: Callable[[Run], float]) -> tuple[float, float]:
        """Returns mean and standard deviation over the seeds; a single seed has no deviation."""
        values = [measure(run) for run in self.runs]
        return fmean(values), stdev(values) if len(values) > 1 else 0.0


def saturate(
    new_scheduler: Callable[[], Policy],
    dataset: str,
    rate: float,
    seconds: float,
    seeds: Iterable[int],
    cost: CostModel = A100_OPT_13B,
) -> Saturation:
    """Runs traces to their end; averages over the time of their arrivals after the warm-up."""
    runs = []
    for seed in seeds:
        trace = poisson_trace(dataset, rate=rate, seconds=seconds, seed=seed)
        average = TimeAverage(WARM_UP * seconds, seconds)
        runs.append(
            Simulator(
                trace, new_scheduler(), cost, average=average, sample_every=SAMPLE_EVERY
            ).run()
        )
    return Saturation(dataset, rate, seconds, runs)
