"""Times each kernel set on each spec, and compares it with ceilings, XLA and other libraries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pallas_kernels.sets import XLA_BACKENDS
from pallas_kernels.tiles import Tiles
from tools.lab.kernel_lab.bounds import Ceilings, work
from tools.lab.kernel_lab.findings import Table, first_line
from tools.lab.kernel_lab.kernel_cases import Case, label, make_case
from tools.lab.kernel_lab.specs import SPECS, Spec
from tools.lab.kernel_lab.timing import Timing, num_layers, stays_in_cache, time_case

TimeCase = Callable[..., Timing]
SPOILED = "CUDA_ERROR"  # the text of an error after which no call of its process can succeed


@dataclass
class Row:
    """Holds the time of one backend on one spec.

    Attributes:
        spec: The spec.
        backend: The kernel set.
        seconds: The time of a call; None where the backend refused or failed.
        note: The reason why there is no time, or what to mind about the number.
        timing: The whole measurement.
        failed: True if the row was neither measured nor refused.
    """

    spec: Spec
    backend: str
    seconds: float | None
    note: str = ""
    timing: Timing | None = None
    failed: bool = False

    def fraction(self, ceilings: Ceilings) -> float | None:
        """Returns the reached share of the measured ceiling that limits this call."""
        return (
            None if self.seconds is None else ceilings.min_seconds(work(self.spec)) / self.seconds
        )

    @classmethod
    def of(cls, data: Mapping[str, Any], *, small: bool = False) -> Row:
        """Returns the row that `as_data` wrote; in small its spec is the named one, cut."""
        spec = next(spec for spec in SPECS if label(spec) == data["spec"])
        timed = Timing(**data["timing"]) if "timing" in data else None
        fields = {name: data[name] for name in ("backend", "seconds", "note", "failed")}
        return cls(spec.cut() if small else spec, timing=timed, **fields)

    def as_data(self, ceilings: Ceilings) -> dict[str, Any]:
        """Returns the row as plain data, with what it reaches."""
        needed = work(self.spec)
        plain: dict[str, Any] = {
            "spec": label(self.spec),
            "backend": self.backend,
            "seconds": self.seconds,
            "note": self.note,
            "failed": self.failed,
        }
        if self.timing:
            plain["timing"] = dataclasses.asdict(self.timing)
        if self.seconds is not None:
            plain["bytes_per_second"] = needed.num_bytes / self.seconds
            plain["flops_per_second"] = needed.flops / self.seconds
            plain["bound"] = ceilings.bound(needed)
            plain["fraction"] = self.fraction(ceilings)
        return plain


def compare(
    specs: Sequence[Spec],
    backends: Sequence[str],
    ceilings: Ceilings,
    *,
    interpret: Sequence[str] = (),
    limit_s: float = 2.0,
    time_left: Callable[[], bool] = lambda: True,
    done: Callable[[Row], None] = lambda _: None,
    time_one: TimeCase = time_case,
    tiles: Mapping[str, Tiles] | None = None,
    layers: int | None = None,
) -> list[Row]:
    """Times every backend on every spec.

    A CUDA error spoils its process, so the rows that follow it are not tried and say so. Where each
    kernel set must get its chance, each has a process of its own, as in tools/lab/gpu_check.py.

    Args:
        specs: The specs.
        backends: The kernel sets.
        ceilings: The measured ceilings.
        interpret: The backends to interpret.
        limit_s: The time for the rounds of a row.
        time_left: Asked before each row; a row that it refuses is not timed and says so.
        done: Called with each row.
        time_one: Times one case.
        tiles: The tiles of backends, where they are not the backend's choice.
        layers: The number of sets of pages; None to make the cache useless.

    Returns:
        A row for each spec and backend.
    """
    rows, spoiled = [], ""
    for spec in specs:
        case: Case | None = None
        for backend in backends:
            if spoiled:
                row = Row(
                    spec,
                    backend,
                    None,
                    f"not tried: this process had an error of CUDA, with {spoiled}",
                )
            elif not time_left():
                row = Row(spec, backend, None, "left out: no time")
            else:
                try:
                    case = case or make_case(spec, layers=layers or num_layers(spec))
                    row = _row(
                        case,
                        backend,
                        ceilings,
                        backend in interpret,
                        limit_s,
                        time_one,
                        (tiles or {}).get(backend),
                    )
                except Exception as error:  # the row reports it, and the others go on
                    refused = isinstance(error, NotImplementedError) or "RESOURCE_EXHAUSTED" in str(
                        error
                    )
                    row = Row(spec, backend, None, first_line(error), failed=not refused)
                    spoiled = (
                        f"{backend} on {label(spec)}"
                        if row.failed and SPOILED in str(error)
                        else ""
                    )
            rows.append(row)
            done(row)
    return rows


def _row(
    case: Case,
    backend: str,
    ceilings: Ceilings,
    interpret: bool,
    limit_s: float,
    time_one: TimeCase,
    tiles: Tiles | None,
) -> Row:
    minimum = None if interpret else ceilings.min_seconds(work(case.spec))
    timing = time_one(
        case,
        backend=backend,
        tiles=tiles,
        interpret=interpret,
        min_seconds=minimum,
        limit_s=limit_s,
    )
    notes = []
    if stays_in_cache(case.spec, len(case.layers)):
        notes.append("KV stays in L2")
    if timing.spread > 0.1:
        notes.append(f"rounds differ by {timing.spread:.0%}")
    return Row(case.spec, backend, timing.seconds, ", ".join(notes), timing)


def table(
    rows: Sequence[Row], ceilings: Ceilings, others: Mapping[str, Mapping[str, float]] | None = None
) -> Table:
    """Returns the rows as a table.

    Args:
        rows: The measured rows.
        ceilings: The measured ceilings.
        others: For names like "contiguous", the seconds of another library by the specs' labels.
            Each gets a column with the ratio of the row's time to its time.
    """
    others = others or {}
    made = Table(
        "Time of a call on the device. The fraction is of the measured ceiling that binds (memory or compute).",
        [
            "spec",
            "backend",
            "us",
            "GB/s",
            "TFLOP/s",
            "bound",
            "fraction",
            "x XLA",
            *(f"x {name}" for name in others),
            "note",
        ],
    )
    for row in rows:
        needed = work(row.spec)
        if row.seconds is None:
            made.rows.append([label(row.spec), row.backend, *["-"] * (6 + len(others)), row.note])
            continue
        xla = [
            each.seconds
            for each in rows
            if each.spec == row.spec and each.backend in XLA_BACKENDS and each.seconds
        ]
        ratios = [
            min(xla) if xla else None,
            *(seconds.get(label(row.spec)) for seconds in others.values()),
        ]
        made.rows.append(
            [
                label(row.spec),
                row.backend,
                f"{row.seconds * 1e6:.1f}",
                f"{needed.num_bytes / row.seconds / 1e9:.0f}",
                f"{needed.flops / row.seconds / 1e12:.1f}",
                ceilings.bound(needed),
                f"{row.fraction(ceilings) or 0:.3f}",
                *("-" if other is None else f"{row.seconds / other:.3f}" for other in ratios),
                row.note,
            ]
        )
    return made


def ceilings_table(ceilings: Ceilings) -> Table:
    """Returns the ceilings as a table."""
    return Table(
        "Measured ceilings (of 1 GiB and of 8192 x 8192 x 8192; smaller in a miniature)",
        ["what", "reached"],
        [
            ["copy, bytes read and written", f"{ceilings.copied / 1e9:.0f} GB/s"],
            ["sum, bytes read", f"{ceilings.read / 1e9:.0f} GB/s"],
            ["bfloat16 matrix product", f"{ceilings.matmul / 1e12:.0f} TFLOP/s"],
        ],
    )
