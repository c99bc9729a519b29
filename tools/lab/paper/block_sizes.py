"""Shows the effect of the block size: figures 18 and 19."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxpage.scheduling import Preemption
from jaxpage.simulation.costs import A100_OPT_13B
from tools.lab.bench_swap import measure as measure_swapping
from tools.lab.paper.effort import Effort
from tools.lab.paper.results import Figure, Interval, Panel, Row, Series
from tools.lab.paper.simulated_cases import PAGED, Case, Workload, run_case
from tools.lab.scheduler_lab.pressure import Mode

SIZES = (1, 4, 16, 32, 64, 128, 256)
QUICK_SIZES = (16, 64, 256)
RATES = {"sharegpt": 1.6, "alpaca": 28.0}  # requests per second: the paper does not give its own
PREEMPTED_RATE = 2.0  # a rate of ShareGPT at which requests are preempted
MEASURED_SIZES, QUICK_MEASURED_SIZES = (1, 4, 16, 64, 128), (1, 16)
NUM_SWAPPED_TOKENS = 256
LATENCY = "normalised latency (s/token)"
MODES: tuple[Mode, ...] = ("recompute", "swap")


class AttentionTime(NamedTuple):
    """Holds the microseconds of attention of one layer, for rows of one query token.

    Attributes:
        context: The positions of a row.
        num_rows: The number of rows.
        paged: The time over blocks.
        contiguous: The time over one stretch of memory for each row.
    """

    context: int
    num_rows: int
    paged: float
    contiguous: float

    @property
    def overhead(self) -> float:
        """Returns the share by which paged attention is slower."""
        return self.paged / self.contiguous - 1


# Takes contexts and numbers of rows.
MeasureAttention = Callable[[Sequence[int], Sequence[int]], list[AttentionTime]]


def figure_18(effort: Effort, measure_attention: MeasureAttention) -> Figure:
    """Makes figure 18."""
    swept = [
        _sweep(
            effort,
            dataset,
            Case(PAGED, Workload(dataset), effort.window(dataset) / 2, seed=0),
            RATES[dataset],
            published,
        )
        for dataset, published in (
            ("sharegpt", "best 16 to 128"),
            ("alpaca", "good at 16 and 32, much worse above"),
        )
    ]
    by_size = Panel(
        "(b) simulated",
        "block size",
        LATENCY,
        [series for _, series in swept],
        log_x=True,
        log_y=True,
    )
    times = measure_attention((64, 128, 256), (8, 32))
    overheads = ", ".join(
        f"{time.num_rows} x {time.context}: {time.overhead:+.0%}" for time in times
    )
    first = Row(
        "a) attention over blocks of 16, against contiguous (a CPU, shape only)",
        "20 to 26 % slower",
        overheads,
    )
    rows = [first, *(row for row, _ in swept)]
    origin = "(a) measured on a CPU, (b) simulated"
    return Figure("18", "Block size", origin, rows, [_attention_panel(times), by_size])


def _sweep(
    effort: Effort, dataset: str, case: Case, rate: float, published: str
) -> tuple[Row, Series]:
    """Simulates the latency at each block size."""
    sizes = _sizes(effort)
    keys = list(itertools.product(sizes, effort.seeds))
    outcomes = effort.pool.map(
        run_case, [(replace(case, block_size=size, seed=seed), rate) for size, seed in keys]
    )
    latencies: dict[int, list[float]] = {}
    for (size, _), outcome in zip(keys, outcomes, strict=True):
        latencies.setdefault(size, []).append(outcome.normalized_latency)
    means = [Interval.of(latencies[size]) for size in sizes]
    text = ", ".join(f"{size}: {mean.text(3)}" for size, mean in zip(sizes, means, strict=True))
    row = Row(f"b) {dataset}, {rate:g} requests/s: s/token by block size", published, text)
    return row, Series(dataset, sizes, [mean.mean for mean in means], [mean.half for mean in means])


def _sizes(effort: Effort) -> Sequence[int]:
    return QUICK_SIZES if effort.quick else SIZES


def _attention_panel(times: Sequence[AttentionTime]) -> Panel:
    groups = [f"{time.num_rows} x {time.context}" for time in times]
    series = [
        Series("contiguous", range(len(times)), [time.contiguous for time in times]),
        Series("blocks of 16", range(len(times)), [time.paged for time in times]),
    ]
    return Panel("(a) a CPU kernel", "rows x context", "microseconds of a layer", series, groups)


def figure_19(effort: Effort) -> Figure:
    """Makes figure 19."""
    case = Case(PAGED, Workload("sharegpt"), effort.window("sharegpt") / 2, seed=0)
    swept = [
        _sweep(
            effort,
            mode,
            replace(case, preemption=Preemption(mode)),
            PREEMPTED_RATE,
            "comparable for 16 to 64",
        )
        for mode in MODES
    ]
    end_to_end = Panel(
        "(b) simulated", "block size", LATENCY, [series for _, series in swept], log_x=True
    )
    measured, measured_row = _measure(effort)
    model, model_rows = _model(_sizes(effort))
    rows = [*model_rows, measured_row, *(row for row, _ in swept)]
    origin = "(a) by the cost model, and measured on a CPU; (b) simulated"
    return Figure("19", "Swapping and recomputation", origin, rows, [model, measured, end_to_end])


def _model(sizes: Sequence[int]) -> tuple[Panel, list[Row]]:
    """Returns the cost model's times for swapping and recomputing a sequence."""
    num_tokens, cost = NUM_SWAPPED_TOKENS, A100_OPT_13B
    one_way = [1e3 * cost.swap_seconds(num_tokens // size, size) for size in sizes]
    round_trips = [2 * time for time in one_way]
    recompute = 1e3 * (max(cost.weights, cost.token * num_tokens) + cost.context_token * num_tokens)
    series = [
        Series("swap in or out", sizes, one_way),
        Series("swap in and out", sizes, round_trips),
        Series("recompute", sizes, [recompute] * len(sizes)),
    ]
    panel = Panel(
        "(a) cost model, A100", "block size", f"ms for {num_tokens} tokens", series, log_x=True
    )
    text = f"in and out {round_trips[0]:.0f} at {sizes[0]} to {round_trips[-1]:.0f} at {sizes[-1]}; recompute {recompute:.0f}"
    ratios = ", ".join(
        f"{size}: {recompute / time:.2f}" for size, time in zip(sizes, round_trips, strict=True)
    )
    published = "in and out about 135 at 1, 10 to 20 at 256; recompute flat"
    return panel, [
        Row("a) ms by block size (cost model, fitted to the figure)", published, text),
        Row("a) recomputation over swapping in and out (cost model)", "never above 1.2", ratios),
    ]


def _measure(effort: Effort) -> tuple[Panel, Row]:
    """Measures an engine's own copies on this machine."""
    sizes = QUICK_MEASURED_SIZES if effort.quick else MEASURED_SIZES
    costs = [
        measure_swapping("demo", size, num_tokens=NUM_SWAPPED_TOKENS, repeats=9) for size in sizes
    ]
    swap = [1e3 * (cost.swap_out_seconds + cost.swap_in_seconds) for cost in costs]
    recompute = [1e3 * cost.recompute_seconds for cost in costs]
    series = [Series("swap in and out", sizes, swap), Series("recompute", sizes, recompute)]
    y_label = f"ms for {NUM_SWAPPED_TOKENS} tokens"
    panel = Panel("(a) a CPU, demo model", "block size", y_label, series, log_x=True, log_y=True)
    swaps = f"in and out {swap[0]:.2f} at {sizes[0]} to {swap[-1]:.2f} at {sizes[-1]}"
    text = f"{swaps}; recompute {min(recompute):.1f} to {max(recompute):.1f}"
    return panel, Row(
        "a) ms by block size (a CPU, demo model, shape only)",
        "swapping dearer in small blocks",
        text,
    )
