"""Writes the results of a run: lines for people, a Markdown section, and JSON for machines.

The section goes to docs/gpu-results.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.lab.kernel_lab.findings import FAILED, LEFT_OUT, PASSED, Finding, Table


def line(finding: Finding) -> str:
    """Returns a finding as a line of text."""
    return f"{finding.status:<8}  {finding.check}: {finding.summary}  ({finding.seconds:.1f} s)"


def count_findings(findings: Sequence[Finding]) -> str:
    """Returns how many findings passed, failed and were left out."""
    counts = [
        (status, sum(finding.status == status for finding in findings))
        for status in (PASSED, FAILED, LEFT_OUT)
    ]
    return ", ".join(f"{count} {status}" for status, count in counts)


def as_data(findings: Sequence[Finding], environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns everything but the tables, which repeat the findings for people."""
    plain = [
        {key: value for key, value in asdict(finding).items() if key != "tables"}
        for finding in findings
    ]
    ok = any(finding.status == PASSED for finding in findings) and not any(
        f.status == FAILED for f in findings
    )
    return {
        "ok": ok,
        "counts": count_findings(findings),
        "environment": dict(environment),
        "findings": plain,
    }


def section(
    findings: Sequence[Finding], environment: Mapping[str, str], *, date: str, command: str
) -> str:
    """Returns a section with the machine, every verdict, and the findings' tables.

    The environment's own table is left out, because the machine is named already.
    """
    device = environment.get("device", "unknown device")
    parts = [
        f"## {date}: {device}, commit {environment.get('commit', 'unknown')}",
        f"`{command}`: {count_findings(findings)}.",
    ]
    parts.append(
        Table(
            "Machine:", ["what", "value"], [[name, value] for name, value in environment.items()]
        ).markdown()
    )
    rows = [
        [f.check, f.status, f.summary, f"{f.seconds:.1f}"]
        for f in findings
        if f.check != "environment"
    ]
    parts.append(Table("Verdicts:", ["check", "verdict", "found", "s"], rows).markdown())
    parts += [table.markdown() for f in findings if f.check != "environment" for table in f.tables]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def append_section(path: Path, text: str) -> None:
    """Appends a section to the file; what the file holds stays as it is."""
    before = (
        path.read_text(encoding="utf-8").rstrip("\n") + "\n\n"
        if path.exists()
        else "# Results on GPUs\n\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(before + text, encoding="utf-8")
