"""Defines what a check found: a verdict, a line, tables.

Findings are kept as lines of JSON, so that a crash loses none that were written before.
"""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, LEFT_OUT = "passed", "FAILED", "left out"
_NUMBER = re.compile(r"[-+\d.e]+")


@dataclass
class Table:
    """Holds rows of texts; the first column is the name of the row."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def markdown(self) -> str:
        """Returns the table in Markdown."""
        rule = ["---:" if numeric else "---" for numeric in self._numeric()]
        cells = [
            [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
            for row in (self.columns, rule, *self.rows)
        ]
        return (
            f"{self.title}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in cells) + "\n"
        )

    def plain(self) -> str:
        """Returns the table in aligned columns for a terminal."""
        rows = [self.columns, *self.rows]
        columns = []
        for column, numeric in enumerate(self._numeric()):
            width = max(len(row[column]) for row in rows)
            columns.append(
                [row[column].rjust(width) if numeric else row[column].ljust(width) for row in rows]
            )
        return (
            self.title
            + "\n"
            + "\n".join(f"  {'  '.join(cells).rstrip()}" for cells in zip(*columns, strict=True))
        )

    def _numeric(self) -> list[bool]:
        """Returns for each column whether it holds nothing but numbers, and dashes for none."""
        return [
            all(_NUMBER.fullmatch(row[column]) for row in self.rows)
            for column in range(len(self.columns))
        ]


@dataclass
class Finding:
    """Holds the result of a check.

    Attributes:
        check: The check's name, such as "parity triton decode".
        status: PASSED, FAILED or LEFT_OUT.
        summary: A line for people.
        seconds: The time that the check took.
        tables: Tables for people.
        data: Data for machines: anything that JSON takes.
    """

    check: str
    status: str
    summary: str
    seconds: float = 0.0
    tables: list[Table] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


class LeftOut(Exception):
    """Says that a check cannot be done here, and why; this is no failure."""


def judge(check: str, run: Callable[[], Finding]) -> Finding:
    """Runs a check so that an exception does not stop the others.

    LeftOut leaves the check out. Any other exception is a failure with its traceback in `data`.
    """
    began = time.monotonic()
    try:
        finding = run()
    except LeftOut as reason:
        finding = Finding(check, LEFT_OUT, str(reason))
    except Exception as error:
        finding = Finding(
            check, FAILED, first_line(error), data={"traceback": traceback.format_exc()[-6000:]}
        )
    finding.seconds = time.monotonic() - began
    return finding


def first_line(error: BaseException) -> str:
    """Returns the exception's type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def append(path: Path, finding: Finding) -> None:
    """Appends a finding to a file of JSON lines."""
    cut = _is_cut(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut else "") + json.dumps(asdict(finding)) + "\n")


def _is_cut(path: Path) -> bool:
    """Returns whether the last line was left unfinished."""
    written = path.read_bytes() if path.exists() else b""
    return bool(written) and not written.endswith(b"\n")


def read(path: Path) -> list[Finding]:
    """Returns the findings that were appended; lines that were cut short are left out.

    Raises:
        ValueError: A line is JSON but no finding.
    """
    findings = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            plain = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(plain, dict) or not isinstance(plain.get("tables"), list):
            raise ValueError(f"{path} holds what is no finding: {line[:80]}")
        findings.append(
            Finding(**{**plain, "tables": [Table(**table) for table in plain["tables"]]})
        )
    return findings


def worst(findings: Sequence[Finding]) -> str:
    """Returns FAILED if any failed, else PASSED if any passed, else LEFT_OUT."""
    statuses = {finding.status for finding in findings}
    return FAILED if FAILED in statuses else PASSED if PASSED in statuses else LEFT_OUT
