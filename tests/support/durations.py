"""tests/durations.json: what each file of tests costs. Seconds are for the order in which files
run; what is counted is a budget.
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from tests.support.executables import Counts

PATH = Path(__file__).parents[1] / "durations.json"
LAB = "lab/"  # a folder whose files `pytest` without a path does not run
UNLISTED = 24  # executables of a file that has no line yet
Record = dict[str, float]  # seconds, cpu_seconds, engines, executables, compiled


class Stopwatch:
    """Wall and CPU seconds since it was made, those of finished child processes included."""

    def __init__(self) -> None:
        self._began, self._times = time.monotonic(), os.times()

    def record(self, counts: Counts) -> Record:
        cpu_seconds = sum(os.times()[:4]) - sum(self._times[:4])
        return {
            "seconds": round(time.monotonic() - self._began, 1),
            "cpu_seconds": round(cpu_seconds, 1),
            "engines": counts.engines,
            "executables": len(counts.requested),
            "compiled": counts.compiled,
        }


def name_of(path: Path) -> str:
    """Returns the name of a file's line: "test_x.py", and "lab/test_x.py" of the laboratory."""
    return path.relative_to(PATH.parent).as_posix()


def read() -> dict[str, Record]:
    """Returns the figures by file, which are none where nothing was ever recorded."""
    return json.loads(PATH.read_text())["files"] if PATH.exists() else {}


def is_of_this_python() -> bool:
    """Returns whether the table was counted with this Python: another one has another JAX, which
    may share less.
    """
    version = json.loads(PATH.read_text())["machine"]["python"] if PATH.exists() else ""
    return version.split(".")[:2] == platform.python_version().split(".")[:2]


def write(records: dict[str, Record]) -> None:
    """Keeps what is there of files that did not run and still exist."""
    files = {
        name: record
        for name, record in {**read(), **records}.items()
        if (PATH.parent / name).exists()
    }
    machine = {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }
    whole: dict[str, Any] = {
        "machine": machine,
        "totals": _totals(files, in_lab=False),
        "totals of tests/lab": _totals(files, in_lab=True),
        "files": dict(sorted(files.items())),
    }
    # a file is a line
    lines = json.dumps(whole, indent=1).replace("\n   ", " ").replace("\n  }", " }")
    PATH.write_text(lines + "\n")


def _totals(files: dict[str, Record], *, in_lab: bool) -> Record:
    keys = ("seconds", "cpu_seconds", "engines", "executables", "compiled")
    records = [record for name, record in files.items() if name.startswith(LAB) == in_lab]
    return {key: round(sum(record.get(key, 0) for record in records), 1) for key in keys}


def over_budget(name: str, num_executables: int, known: dict[str, Record]) -> str | None:
    """Returns what to tell whose file needs more executables than its line in tests/durations.json
    says. Counted, so no machine is too slow.
    """
    line = int(known[name]["executables"]) if name in known else UNLISTED
    if num_executables <= line:
        return None
    return (
        f"the engines of tests/{name} need {num_executables} different executables; its budget is "
        f"{line} (tests/durations.json). "
        "Share an engine or a geometry (tests/support/engines.py). If the tests are worth the "
        "time that more executables take to compile: "
        f"pytest -n 0 tests/{name} --write-durations, and say why in the commit."
    )
