"""Compares measured rows with the goals of the kernels; a missed goal fails no check."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tools.lab.kernel_lab.bounds import Ceilings, work
from tools.lab.kernel_lab.compare_sets import Row
from tools.lab.kernel_lab.findings import Table
from tools.lab.kernel_lab.kernel_cases import label
from tools.lab.kernel_lab.specs import Spec

BANDWIDTH = 0.85  # share of the measured bandwidth: decode, batch from 16, context from 2k
CONTIGUOUS = 1.10  # times the time of contiguous attention, for the same decodes
MATMUL = 0.6  # share of the measured matrix product: chunks from 2k tokens
BATCH, CONTEXT, CHUNK = 16, 2048, 2048
WORTH = 0.02  # share of the time that larger blocks must save


def _decode(row: Row) -> bool:
    return (
        row.spec.max_query_len == 1
        and len(row.spec.contexts) >= BATCH
        and min(row.spec.contexts) >= CONTEXT
    )


def table(
    rows: Sequence[Row], ceilings: Ceilings, contiguous: Mapping[str, float] | None = None
) -> Table:
    """Returns the fastest backend of each spec that has a goal.

    Args:
        rows: The measured rows.
        ceilings: The measured ceilings.
        contiguous: The seconds of contiguous attention by the specs' labels.
    """
    made = Table(
        "Goals, by the fastest backend", ["goal", "spec", "backend", "reached", "wanted", "met"]
    )
    fastest: dict[str, Row] = {}
    for row in sorted(
        (row for row in rows if row.seconds is not None), key=lambda row: row.seconds or 0.0
    ):
        fastest.setdefault(label(row.spec), row)
    for name, row in fastest.items():
        seconds, needed = row.seconds or 1.0, work(row.spec)
        goals: list[tuple[str, float, float, bool]] = []
        if _decode(row) and row.spec.sliding_window is None:
            reached = needed.num_bytes / seconds / ceilings.bandwidth
            goals.append(("share of measured bandwidth", reached, BANDWIDTH, reached >= BANDWIDTH))
            if contiguous and name in contiguous:
                ratio = seconds / contiguous[name]
                goals.append(
                    ("time against contiguous attention", ratio, CONTIGUOUS, ratio <= CONTIGUOUS)
                )
        if row.spec.max_query_len >= CHUNK:
            reached = needed.flops / seconds / ceilings.matmul
            goals.append(("share of measured matmul", reached, MATMUL, reached >= MATMUL))
        for goal, reached, expected, met in goals:
            made.rows.append(
                [
                    goal,
                    name,
                    row.backend,
                    f"{reached:.3f}",
                    f"{expected:.2f}",
                    "yes" if met else "no",
                ]
            )
    return made


def block_sizes(rows: Sequence[Row]) -> Table:
    """Returns the times of calls that differ in the slots of a block alone, and the best number.

    It belongs in `MEASURED_BLOCK_SIZES` of jaxpage/device/hardware/device_spec.py, by the card.
    """
    made = Table(
        f"Slots of a block; the best are the fewest within {WORTH:.0%} of the fastest, since larger "
        "blocks leave more slots unused",
        ["spec", "backend", "slots", "us", "best"],
    )
    alike: dict[tuple[Spec, str], dict[int, Row]] = {}
    for row in rows:
        if row.seconds is not None:
            call = dataclasses.replace(row.spec, name="", block_size=1)
            alike.setdefault((call, row.backend), {})[row.spec.block_size] = row
    for (_, backend), by_size in alike.items():
        if len(by_size) < 2:
            continue
        times = {size: by_size[size].seconds or 0.0 for size in sorted(by_size)}
        best = next(size for size in times if times[size] <= (1 + WORTH) * min(times.values()))
        for size, seconds in times.items():
            name, is_best = label(by_size[size].spec), "yes" if size == best else ""
            made.rows.append([name, backend, f"{size}", f"{seconds * 1e6:.1f}", is_best])
    return made
