"""The goals of the kernels, and how far measured rows are from them. Missing one is no failure of a check; it is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.kernel_lab.bounds import Ceilings, work
from tools.kernel_lab.compare_sets import Row
from tools.kernel_lab.findings import Table
from tools.kernel_lab.kernel_cases import label

BANDWIDTH = 0.85  # of the measured one: decode, batch 16 and up, context 2k and up
CONTIGUOUS = 1.10  # times contiguous attention: the same
MATMUL = 0.6  # of the measured matrix product: chunks of 2k tokens and up
BATCH, CONTEXT, CHUNK = 16, 2048, 2048


def _decode(row: Row) -> bool:
    return (
        row.spec.max_query_len == 1
        and len(row.spec.contexts) >= BATCH
        and min(row.spec.contexts) >= CONTEXT
    )


def table(
    rows: Sequence[Row], ceilings: Ceilings, contiguous: Mapping[str, float] | None = None
) -> Table:
    """The fastest backend of each spec that a goal speaks of. contiguous: seconds by the specs' labels."""
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
        found: list[tuple[str, float, float, bool]] = []
        if _decode(row) and row.spec.sliding_window is None:
            reached = needed.num_bytes / seconds / ceilings.bandwidth
            found.append(("share of measured bandwidth", reached, BANDWIDTH, reached >= BANDWIDTH))
            if contiguous and name in contiguous:
                ratio = seconds / contiguous[name]
                found.append(
                    ("time against contiguous attention", ratio, CONTIGUOUS, ratio <= CONTIGUOUS)
                )
        if row.spec.max_query_len >= CHUNK:
            reached = needed.flops / seconds / ceilings.matmul
            found.append(("share of measured matmul", reached, MATMUL, reached >= MATMUL))
        for goal, reached, wanted, met in found:
            made.rows.append(
                [goal, name, row.backend, f"{reached:.3f}", f"{wanted:.2f}", "yes" if met else "no"]
            )
    return made
