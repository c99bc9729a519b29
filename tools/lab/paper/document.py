"""Writes the figures as one Markdown document: pictures, notes, and tables.

The tables have the paper's numbers and ours.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tools.lab.paper.notes import INTRODUCTION, NOTES
from tools.lab.paper.results import Check, Figure

WIDTH = 118
TOLERANCES = (
    "The program ends with status 1 where one fails. Tests hold the quick mode to them: to those of figures 2 and 13\n"
    "always, to all of them in the nightly run."
)


def document(figures: Sequence[Figure], *, command: str, effort: str, images: str) -> str:
    """Returns the document.

    Args:
        figures: The figures.
        command: The command that made them.
        effort: The text about the runs.
        images: The place of a picture, as the document refers to it: `images/{}.svg`.
    """
    effort = textwrap.fill(effort, WIDTH, subsequent_indent="  ")
    parts = [INTRODUCTION.format(command=command, effort=effort)]
    parts += [_section(figure, images) for figure in figures]
    parts.append(_tolerances([check for figure in figures for check in figure.checks]))
    return "\n".join(parts)


def _section(figure: Figure, images: str) -> str:
    name = (
        figure.name[0].upper() + figure.name[1:]
        if figure.name.startswith("table")
        else f"Figure {figure.name}"
    )
    note = f"*{figure.origin[0].upper()}{figure.origin[1:]}.* {NOTES[figure.name].strip()}"
    lines = [f"## {name}: {figure.title}", "", textwrap.fill(note, WIDTH), ""]
    if figure.panels:
        lines += [f"![{name}: {figure.title}]({images.format(f'figure{figure.name}')})", ""]
    lines += ["| | paper | here |", "|---|---|---|"]
    lines += [f"| {row.what} | {row.paper} | {row.ours} |" for row in figure.rows]
    return "\n".join([*lines, ""])


def _tolerances(checks: Sequence[Check]) -> str:
    lines = ["## Tolerances", "", TOLERANCES, "", "| | must lie in | here | |", "|---|---|---|---|"]
    for check in checks:
        verdict = "holds" if check.holds else "**fails**"
        lines.append(
            f"| {check.name} | {check.low:.2f} to {check.high:.2f} | {check.value:.2f} | {verdict} |"
        )
    return "\n".join([*lines, ""])
