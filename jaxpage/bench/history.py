"""Adds a row for each run to a table in a document, for `bench throughput --record FILE`."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpage.bench.results import fingerprint
from jaxpage.errors import UsageError

BEGIN = "<!-- rows by `jaxpage bench throughput --record` -->"
END = "<!-- end of these rows -->"
COLUMNS = (
    *("date", "commit", "model", "work", "output tokens/s", "requests/s", "preemptions"),
    *("settings", "machine", "versions"),
)
_HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"


def check_record(path: str) -> None:
    """Raises UsageError if there is no such document, or it has no table for the rows."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--record {path}: {error}") from None
    if text.count(BEGIN) != 1 or END not in text.partition(BEGIN)[2]:
        raise UsageError(
            f"--record {path}: the file needs a line {BEGIN} and, after it, a line {END}"
        )


def record(path: str, result: Mapping[str, Any], *, day: datetime.date | None = None) -> None:
    """Adds a row with the commit and the results of a run below the others."""
    text = Path(path).read_text(encoding="utf-8")
    before, _, table_and_after = text.partition(BEGIN)
    rows, _, after = table_and_after.partition(END)
    rows = rows.strip() + "\n" if rows.strip() else _HEAD
    line = f"| {' | '.join(_cells(result, day or datetime.datetime.now(datetime.UTC).date()))} |\n"
    Path(path).write_text(f"{before}{BEGIN}\n\n{rows}{line}\n{END}{after}", encoding="utf-8")


def _cells(result: Mapping[str, Any], day: datetime.date) -> list[str]:
    where = result["environment"]
    seconds = result.get("durations") or [result["duration"]]
    speeds = sorted(result["total_output_tokens"] / each for each in seconds)
    spread = (
        f" ({speeds[0]:.1f} to {speeds[-1]:.1f}, {len(speeds)} runs)" if len(speeds) > 1 else ""
    )
    commit = where["commit"]
    return [
        str(day),
        # A commit that ends with + had changes, which must show after the cut.
        f"{commit[:7]}{'+' * commit.endswith('+')}" if commit else f"version {where['jaxpage']}",
        Path(result["config"]["model"]).name,
        f"{result['completed']} x {result['dataset']}, seed {result['seed']}, "
        f"{result['total_input_tokens']:,} tokens in, {result['total_output_tokens']:,} out",
        f"{result['output_throughput']:.1f}{spread}",
        f"{result['request_throughput']:.2f}",
        f"{result['num_preemptions']}",
        fingerprint(result["config"]),
        f"{where['device']}, {where['cpu']}, {where['cores']} cores",
        f"Python {where['python']}, jax {where['jax']}",
    ]
