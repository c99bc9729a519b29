"""Returns results as text for people and as plain dicts for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpage.simulation.accounting import Run
from jaxpage.tables import align
from tools.lab.scheduler_lab.host_time import PlanningTime, WaitingTime
from tools.lab.scheduler_lab.pressure import Pressure
from tools.lab.scheduler_lab.saturation import Saturation

# Each measure has a heading, a key in JSON, a function and digits. Shares are of 1 in JSON and
# percent in the table.
_MEASURES: tuple[tuple[str, str, Callable[[Run], float], int], ...] = (
    ("tokens %", "token_share", lambda run: run.mean.token_slots / run.mean.num_slots, 2),
    ("reserved %", "reserved_share", lambda run: run.mean.reserved_slots / run.mean.num_slots, 2),
    ("internal %", "internal_share", lambda run: run.mean.internal_slots / run.mean.num_slots, 2),
    ("free %", "free_share", lambda run: run.mean.free_slots / run.mean.num_slots, 2),
    ("waste of the pool %", "pool_waste", lambda run: run.mean.pool_waste, 2),
    ("of blocks in use %", "allocated_waste", lambda run: run.mean.allocated_waste, 2),
    ("running", "mean_running", lambda run: run.mean.running, 1),
    ("waiting", "mean_waiting", lambda run: run.mean.waiting, 1),
    ("s/token", "normalized_latency", lambda run: run.normalized_latency, 2),
    (
        "preemptions/request",
        "preemptions_per_request",
        lambda run: run.num_preemptions / len(run.served),
        2,
    ),
    ("swapping %", "swapping_share", lambda run: run.swap_seconds / run.seconds, 2),
)


def saturation_table(heading: str, results: Mapping[str, Saturation]) -> list[str]:
    """Returns a line for each labelled result: means over the seeds and standard deviations."""
    rows = [[heading, *(measured for measured, *_ in _MEASURES)]]
    for label, result in results.items():
        cells = [label]
        for measured, _, measure, digits in _MEASURES:
            mean, deviation = result.over_seeds(measure)
            factor = 100 if measured.endswith("%") else 1
            cells.append(f"{factor * mean:.{digits}f} ± {factor * deviation:.{digits}f}")
        rows.append(cells)
    return align(rows)


def saturation_dict(result: Saturation) -> dict[str, Any]:
    """Returns every measure, seed by seed."""
    return {
        "request_rate": result.rate,
        "num_requests": [len(run.served) for run in result.runs],
        "num_steps": [run.num_steps for run in result.runs],
        **{key: [measure(run) for run in result.runs] for _, key, measure, _ in _MEASURES},
    }


def pressure_table(results: Sequence[Pressure]) -> list[str]:
    """Returns a line for each run under pressure."""
    rows = [
        [
            "pool",
            "mode",
            "blocks",
            "seconds",
            "finished",
            "preemptions",
            "blocks out",
            "blocks in",
            "swapping s",
        ]
    ]
    for result in results:
        run = result.run
        counts = len(run.served), run.num_preemptions, run.num_swapped_out, run.num_swapped_in
        cells = [
            f"{result.share:.0%}",
            result.mode,
            str(result.num_blocks),
            f"{run.seconds:.1f}",
            *map(str, counts),
        ]
        rows.append([*cells, f"{run.swap_seconds:.2f}"])
    return align(rows)


def pressure_dict(result: Pressure) -> dict[str, Any]:
    """Returns the numbers of a run under pressure."""
    run = result.run
    return {
        "share": result.share,
        "mode": result.mode,
        "num_blocks": result.num_blocks,
        "seconds": run.seconds,
        "completed": len(run.served),
        "num_preemptions": run.num_preemptions,
        "num_swapped_out_blocks": run.num_swapped_out,
        "num_swapped_in_blocks": run.num_swapped_in,
        "swap_seconds": run.swap_seconds,
    }


def planning_table(times: Sequence[PlanningTime]) -> list[str]:
    """Returns a line for each planning time."""
    rows = [
        [
            "running",
            "prefix caching",
            "plan µs",
            "commit µs",
            "µs/sequence",
            "batch builder µs",
            "µs/sequence",
        ]
    ]
    for item in times:
        durations = f"{item.plan_us:.0f}", f"{item.commit_us:.0f}", f"{item.us_per_sequence:.2f}"
        building = f"{item.build_us:.0f}", f"{item.build_us / item.num_running:.2f}"
        rows.append(
            [str(item.num_running), "on" if item.prefix_caching else "off", *durations, *building]
        )
    return align(rows)


def waiting_table(times: Sequence[WaitingTime]) -> list[str]:
    """Returns a line for each waiting time."""
    rows = [["waiting", "running", "plan µs", "commit µs", "add µs", "abort µs"]]
    for item in times:
        durations = (item.plan_us, item.commit_us, item.add_us, item.abort_us)
        rows.append(
            [
                f"{item.num_waiting:,}",
                str(item.num_running),
                *(f"{duration:.1f}" for duration in durations),
            ]
        )
    return align(rows)
