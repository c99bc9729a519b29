"""Keeps what tools/gpu_slot.py finds: few files, complete at any moment, and a short text."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from tools.kernel_lab.environment import commit
from tools.kernel_lab.findings import (
    FAILED,
    LEFT_OUT,
    PASSED,
    Finding,
    append,
    first_line,
    read,
    worst,
)
from tools.kernel_lab.parts import bench_tables
from tools.kernel_lab.record import append_section, counted, section

RESULTS, REPORT, LOGS = "results.jsonl", "report.md", "logs.txt"
ENVIRONMENT = "environment"
SCREEN = 9000  # characters, of a whole run
LINE = 180
LAST_WORDS = 800  # of them kept for the end
QUIET = ("parity", "pages")  # parts of which the screen shows failures alone
NO_RESULTS = re.compile(r"\*\*There are no results yet\.\*\*.*?\n\n", re.DOTALL)


class Screen:
    """Prints texts until the run's share of characters is used up; the files have the rest."""

    def __init__(self, limit: int = SCREEN) -> None:
        self._left = limit - LAST_WORDS
        self._full = False

    def say(self, text: str) -> None:
        cut = "\n".join(
            line if len(line) <= LINE else f"{line[: LINE - 3]}..." for line in text.splitlines()
        )
        if self._full or len(cut) + 1 > self._left:
            if not self._full:
                print(f"(the rest is in {REPORT})", flush=True)
            self._full = True
            return
        self._left -= len(cut) + 1
        print(cut, flush=True)

    def end(self, text: str) -> None:
        """Prints the last words, for which there is room."""
        print(text[: LAST_WORDS - 100], flush=True)


class Results:
    """Findings by part, as lines of JSON in a directory that outlives the run (`state`) and in one that is taken home (`out`).

    A part has ended when the last of its findings is its verdict, whose check is "part NAME".
    """

    def __init__(self, state: Path, out: Path, *, small: bool) -> None:
        self.state, self.out, self._small = state, out, small
        self.problem = ""  # of the report
        for directory in (state, out):
            directory.mkdir(parents=True, exist_ok=True)
        self.parts = by_part(read(state / RESULTS))
        self._write()

    @property
    def findings(self) -> list[Finding]:
        return [finding for found in self.parts.values() for finding in found]

    def add(self, part: str, finding: Finding) -> None:
        """Appends a finding to the files at once. It counts when the part has ended."""
        for path in self._paths():
            append(path, _of(part, finding))

    def end(self, part: str, found: Sequence[Finding], seconds: float) -> Finding:
        """Takes what a part found in place of what it found before, and returns its verdict."""
        cut = any(one.check == part and one.status == LEFT_OUT for one in found)
        verdict = Finding(
            f"part {part}", LEFT_OUT if cut else worst(found), counted(found), seconds
        )
        if not (cut and len(found) == 1 and part in self.parts):  # else it was not even begun
            self.put(part, [_of(part, finding) for finding in (*found, verdict)])
        return verdict

    def put(self, part: str, findings: list[Finding]) -> None:
        """Keeps these findings, and no others of the part."""
        self.parts[part] = findings
        self._write()

    def verdict(self, part: str) -> str:
        """Returns how a part ended, "" if it has not."""
        last = self.parts.get(part, [])[-1:]
        return last[0].status if last and last[0].check == f"part {part}" else ""

    def _paths(self) -> list[Path]:
        return sorted({self.state / RESULTS, self.out / RESULTS})

    def _write(self) -> None:
        for path in self._paths():
            new = path.with_suffix(".new")
            new.write_text("", encoding="utf-8")
            for finding in self.findings:
                append(new, finding)
            os.replace(new, path)
        if self.parts:
            (self.out / REPORT).write_text(self._report(), encoding="utf-8")
        (self.out / LOGS).write_text(_logs(self.findings), encoding="utf-8")
        for tuned in sorted((self.state / "tuned").glob("*.json")):
            shutil.copy(tuned, self.out / tuned.name)

    def _report(self) -> str:
        """Returns the report; where it cannot be made, why not: the parts go on."""
        self.problem = ""
        try:
            return report(self.findings, small=self._small)
        except Exception as error:
            self.problem = (
                f"the report could not be made, {RESULTS} has everything: {first_line(error)}"
            )
            return self.problem + "\n"


def _of(part: str, finding: Finding) -> Finding:
    return dataclasses.replace(finding, data={**finding.data, "part": part})


def by_part(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    parts: dict[str, list[Finding]] = {}
    for finding in findings:
        parts.setdefault(finding.data.get("part", ""), []).append(finding)
    return parts


def _logs(findings: Sequence[Finding]) -> str:
    """Returns what failures printed and raised."""
    failed = [finding for finding in findings if finding.status == FAILED]
    texts = [
        (one, one.data[key]) for one in failed for key in ("traceback", "log") if one.data.get(key)
    ]
    return "\n".join(
        f"== {one.data['part']}: {one.check}: {one.summary}\n{text}" for one, text in texts
    )


def lines(part: str, findings: Sequence[Finding]) -> list[str]:
    """Returns what the screen shows of a part."""
    quiet = part.startswith(QUIET)
    return [
        f"  {one.status}: {one.check}: {one.summary}"
        for one in findings
        if one.status == FAILED or not quiet
    ]


def machine(findings: Sequence[Finding]) -> dict[str, str]:
    """Returns what the environment says of the machine that the findings are of."""
    found = next((one.data for one in findings if one.check == ENVIRONMENT), {})
    return {name: value for name, value in found.items() if name != "part"}


def report(findings: Sequence[Finding], *, small: bool) -> str:
    """Returns a section of Markdown with every finding, and one table of all kernel sets."""
    where = machine(findings)
    if where.get("commit", "").startswith("unknown"):
        where["commit"] = commit()
    tables = bench_tables(findings, small=small)
    joined = [Finding("kernels", PASSED, "all kernel sets", tables=tables)] if tables else []
    date = where.get("date", "unknown date")
    titled = [_titled(finding) for finding in findings]
    return section([*titled, *joined], where, date=date, command="python tools/gpu_slot.py")


def _titled(finding: Finding) -> Finding:
    """Returns the finding with tables that say which part they are of: two parts may time the same."""
    part = finding.data.get("part", "")
    tables = [
        dataclasses.replace(table, title=f"{part}: {table.title}") for table in finding.tables
    ]
    return dataclasses.replace(finding, tables=tables)


def record(results: Path, document: Path) -> str:
    """Appends the results of a GPU to a document, which no longer says that there are none.

    Returns a line that says what was recorded. Raises ValueError for results that are not of a GPU.
    """
    if not results.is_file():
        raise ValueError(
            f"there is no file {results}: run tools/gpu_slot.py on a GPU first, or name its results.jsonl by --results"
        )
    findings = read(results)
    where = machine(findings)
    if where.get("platform") != "gpu":
        device = where.get("device", "no machine")
        raise ValueError(
            f"{results} holds results of {device}, not of a GPU: {document} takes none but a GPU's"
        )
    before = document.read_text(encoding="utf-8") if document.exists() else ""
    if NO_RESULTS.search(before):
        document.write_text(NO_RESULTS.sub("", before, count=1), encoding="utf-8")
    append_section(document, report(findings, small=False))
    return f"recorded in {document}: {where['device']}, jax {where['jax']}, {where['date']}"
