"""Keeps the results of tools/gpu_slot.py: few files, complete at any moment, and a short text."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from tools.lab.kernel_lab.environment import commit
from tools.lab.kernel_lab.findings import (
    FAILED,
    LEFT_OUT,
    PASSED,
    Finding,
    append,
    first_line,
    read,
    worst,
)
from tools.lab.kernel_lab.parts import bench_tables
from tools.lab.kernel_lab.record import append_section, count_findings, section

RESULTS, REPORT, LOGS = "results.jsonl", "report.md", "logs.txt"
ENVIRONMENT = "environment"
SCREEN = 9000  # characters for a whole run
LINE = 180
LAST_WORDS = 800  # characters kept for the end
QUIET = ("parity", "pages")  # parts of which the screen shows only failures
NO_RESULTS = re.compile(r"\*\*There are no results yet\.\*\*.*?\n\n", re.DOTALL)


class Screen:
    """Prints texts until the run's share of characters is used up; the files have the rest."""

    def __init__(self, limit: int = SCREEN) -> None:
        self._left = limit - LAST_WORDS
        self._full = False

    def say(self, text: str) -> None:
        """Prints a text, or once that the rest is in the report."""
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
        """Prints the last words, for which room was kept."""
        print(text[: LAST_WORDS - 100], flush=True)


class Results:
    """Keeps findings by part, as lines of JSON.

    They are in a directory that outlives the run (`state`) and in one that is taken home (`out`). A
    part has ended when the last of its findings is its verdict, whose check is "part NAME".
    """

    def __init__(self, state: Path, out: Path, *, small: bool) -> None:
        self.state, self.out, self._small = state, out, small
        self.problem = ""  # why there is no report
        for directory in (state, out):
            directory.mkdir(parents=True, exist_ok=True)
        self.parts = by_part(read(state / RESULTS))
        self._write()

    @property
    def findings(self) -> list[Finding]:
        """Returns all findings."""
        return [finding for findings in self.parts.values() for finding in findings]

    def add(self, part: str, finding: Finding) -> None:
        """Appends a finding to the files at once; it counts when the part has ended."""
        for path in self._paths():
            append(path, _of(part, finding))

    def end(self, part: str, findings: Sequence[Finding], seconds: float) -> Finding:
        """Replaces what a part found before with what it found now, and returns its verdict."""
        cut = any(each.check == part and each.status == LEFT_OUT for each in findings)
        verdict = Finding(
            f"part {part}", LEFT_OUT if cut else worst(findings), count_findings(findings), seconds
        )
        # Otherwise the part was not even begun
        if not (cut and len(findings) == 1 and part in self.parts):
            self.put(part, [_of(part, finding) for finding in (*findings, verdict)])
        return verdict

    def put(self, part: str, findings: list[Finding]) -> None:
        """Keeps these findings, and no others of the part."""
        self.parts[part] = findings
        self._write()

    def verdict(self, part: str) -> str:
        """Returns how a part ended; "" if it has not."""
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
        """Returns the report, or why it cannot be made; the parts go on."""
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
    """Groups the findings by part."""
    parts: dict[str, list[Finding]] = {}
    for finding in findings:
        parts.setdefault(finding.data.get("part", ""), []).append(finding)
    return parts


def _logs(findings: Sequence[Finding]) -> str:
    """Returns what failures printed and raised."""
    failed = [finding for finding in findings if finding.status == FAILED]
    texts = [
        (each, each.data[key])
        for each in failed
        for key in ("traceback", "log")
        if each.data.get(key)
    ]
    return "\n".join(
        f"== {each.data['part']}: {each.check}: {each.summary}\n{text}" for each, text in texts
    )


def lines(part: str, findings: Sequence[Finding]) -> list[str]:
    """Returns the lines about a part for the screen."""
    quiet = part.startswith(QUIET)
    return [
        f"  {each.status}: {each.check}: {each.summary}"
        for each in findings
        if each.status == FAILED or not quiet
    ]


def machine(findings: Sequence[Finding]) -> dict[str, str]:
    """Returns the environment's description of the machine of the findings."""
    facts = next((each.data for each in findings if each.check == ENVIRONMENT), {})
    return {name: value for name, value in facts.items() if name != "part"}


def report(findings: Sequence[Finding], *, small: bool) -> str:
    """Returns a section of Markdown with every finding, and one table of all kernel sets."""
    where = machine(findings)
    if where.get("commit", "").startswith("unknown"):
        where["commit"] = commit()
    tables = bench_tables(findings, small=small)
    joined = [Finding("kernels", PASSED, "all kernel sets", tables=tables)] if tables else []
    date = where.get("date", "unknown date")
    titled = [_with_title(finding) for finding in findings]
    return section([*titled, *joined], where, date=date, command="python tools/gpu_slot.py")


def _with_title(finding: Finding) -> Finding:
    """Returns the finding with the part's name in the titles of its tables.

    Two parts may time the same.
    """
    part = finding.data.get("part", "")
    tables = [
        dataclasses.replace(table, title=f"{part}: {table.title}") for table in finding.tables
    ]
    return dataclasses.replace(finding, tables=tables)


def record(results: Path, document: Path) -> str:
    """Appends the results of a GPU to a document, and removes its note that there are none.

    Returns:
        A line that says what was recorded.

    Raises:
        ValueError: There are no results, or they are not of a GPU.
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
