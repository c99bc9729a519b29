"""Draws normalised latency against the request rate, and finds the highest sustained rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxpage.simulation.beams import Ancestry
from tools.lab.paper.effort import Effort
from tools.lab.paper.results import Interval, Panel, Row, Series
from tools.lab.paper.simulated_cases import (
    OPT_13B,
    PAGED,
    Case,
    Machine,
    Outcome,
    Workload,
    run_curve,
)

# Seconds per token; the highest sustained rate is the one at which a curve passes this.
SUSTAINED = 0.5
LIMIT = 1.0  # seconds per token: the end of the paper's axes


@dataclass(frozen=True)
class Comparison:
    """One panel: systems that serve the same requests.

    Attributes:
        name: The letter of the panel.
        title: The title.
        workload: The requests.
        expected: About the highest rate of each system; the rates of the curve are chosen around
            it.
        paper: The highest rates, read off the paper's plots.
        machine: The model on its GPUs.
        share_of_window: The part of the usual window for which requests arrive.
    """

    name: str
    title: str
    workload: Workload
    expected: Mapping[str, float]
    paper: Mapping[str, float]
    machine: Machine = OPT_13B
    share_of_window: float = 1.0


@dataclass(frozen=True)
class Curves:
    """Holds the results of a comparison.

    Attributes:
        comparison: The comparison.
        of: For each system and each seed, the outcomes by rising rate.
    """

    comparison: Comparison
    of: Mapping[str, Sequence[Sequence[Outcome]]] = field(default_factory=dict)

    def sustained(self, system: str) -> list[float]:
        """Returns the highest rate of each seed, in requests per second."""
        return [highest_rate(outcomes) for outcomes in self.of[system]]

    def ratio(self, system: str) -> Interval:
        """Returns the engine's highest rate divided by another system's, seed by seed."""
        pairs = zip(self.sustained(PAGED), self.sustained(system), strict=True)
        return Interval.of(ours / theirs for ours, theirs in pairs)

    def rows(self) -> list[Row]:
        """Returns the lines of the table: the highest rates, and the engine's ratios to them."""
        rows = []
        paper = self.comparison.paper
        for system in self.of:
            ours = Interval.of(self.sustained(system)).text()
            read = f"{paper[system]:g}" if system in paper else ""
            if system != PAGED:
                ours += f" (jaxpage: {self.ratio(system).text()} times)"
                if PAGED in paper and system in paper:
                    read += f" ({paper[PAGED] / paper[system]:.1f} times)"
            rows.append(
                Row(f"{self.comparison.name}) {self.comparison.title}: {system}", read, ours)
            )
        return rows

    def panel(self) -> Panel:
        """Returns the panel of the picture."""
        series = []
        for system, by_seed in self.of.items():
            columns = list(zip(*by_seed, strict=False))  # up to the end of the shortest curve
            latencies = [
                Interval.of(outcome.normalized_latency for outcome in column) for column in columns
            ]
            rates = [column[0].rate for column in columns]
            series.append(
                Series(
                    system,
                    rates,
                    [latency.mean for latency in latencies],
                    [latency.half for latency in latencies],
                )
            )
        title = f"({self.comparison.name}) {self.comparison.title}"
        return Panel(title, "requests/s", "normalised latency (s/token)", series, y_limit=LIMIT)


def highest_rate(outcomes: Sequence[Outcome]) -> float:
    """Returns the rate at which the curve passes `SUSTAINED`.

    The curve is interpolated on logarithmic axes between two points. For a curve that begins above
    it, the first rate is returned; for one that never reaches it, the last rate.
    """
    before = outcomes[0]
    for outcome in outcomes:
        if outcome.normalized_latency > SUSTAINED:
            if outcome is before:
                break
            low, high = math.log(before.normalized_latency), math.log(outcome.normalized_latency)
            share = (math.log(SUSTAINED) - low) / (high - low)
            return before.rate * math.pow(outcome.rate / before.rate, share)
        before = outcome
    return before.rate


def compare(
    effort: Effort,
    comparisons: Sequence[Comparison],
    ancestries: Mapping[int, Sequence[Ancestry]] | None = None,
) -> list[Curves]:
    """Simulates all curves of all panels at the same time.

    The engine's curves take longest, so they begin.
    """
    jobs: list[tuple[int, str, Case, list[float]]] = []
    for index, comparison in enumerate(comparisons):
        for system, expected in comparison.expected.items():
            for seed in effort.seeds:
                seconds = comparison.share_of_window * effort.window(comparison.workload.dataset)
                case = Case(
                    system,
                    comparison.workload,
                    seconds,
                    seed,
                    comparison.machine,
                    ancestries=ancestries
                    if ancestries and comparison.workload.is_beam_search
                    else {},
                )
                jobs.append((index, system, case, [share * expected for share in effort.shares]))
    jobs.sort(key=lambda job: job[1] != PAGED)
    results = effort.pool.map(run_curve, [(case, rates, LIMIT) for _, _, case, rates in jobs])
    outcomes_by_trace: list[dict[str, list[list[Outcome]]]] = [
        {s: [] for s in comparison.expected} for comparison in comparisons
    ]
    for (index, system, _, _), outcomes in zip(jobs, results, strict=True):
        outcomes_by_trace[index][system].append(outcomes)
    return [
        Curves(comparison, curves)
        for comparison, curves in zip(comparisons, outcomes_by_trace, strict=True)
    ]
