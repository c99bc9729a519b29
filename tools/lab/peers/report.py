"""Writes the report of `tools/compare_engines.py`: a section of a document, and a chart."""

from __future__ import annotations

import argparse
import datetime
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from jaxpage.bench import environment
from tools.lab.peers.cases import CASES, LEGEND
from tools.lab.peers.task import TRACE, Answer, rows_name

BEGIN = "<!-- written by tools/compare_engines.py -->"
END = "<!-- end of what tools/compare_engines.py wrote -->"
Answers = dict[str, dict[str, list[Answer]]]  # by name of the case and by letters of the mode


@dataclass(frozen=True)
class Best:
    """Holds a number of an engine in its best mode, in seconds; infinite if not measured.

    Attributes:
        median: The median of all rounds.
        lowest: The shortest.
        highest: The longest.
        mode: The letters of the mode.
    """

    median: float
    lowest: float
    highest: float
    mode: str

    def milliseconds(self) -> str:
        """Returns a cell of the table, such as `4.8 (4.7 to 5.1) sf`."""
        if math.isinf(self.median):
            return "not measured"
        spread = f"({self.lowest * 1e3:.1f} to {self.highest * 1e3:.1f})"
        return f"{self.median * 1e3:.1f} {spread} {self.mode}".strip()


def best(modes: Mapping[str, Sequence[Answer]], number: str) -> Best:
    """Returns a number of an engine, in the mode that was the fastest in the first round."""
    mode = min(
        (letters for letters in modes if number in modes[letters][0].seconds),
        key=lambda letters: modes[letters][0].seconds[number],
    )
    seconds = [each.seconds[number] for each in modes[mode] if number in each.seconds]
    seconds = [each for each in seconds if math.isfinite(each)] or [math.inf]
    return Best(median(seconds), min(seconds), max(seconds), mode)


def table_row(cells: Sequence[str]) -> str:
    """Returns a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def report(
    answers: Answers,
    model: str,
    trace: Sequence[tuple[list[int], int]],
    arguments: argparse.Namespace,
) -> str:
    """Returns the section of a document that has the table.

    Outputs are compared with those of the first engine: equal texts do not happen by chance.
    """
    num_input, num_output = (
        sum(each) for each in zip(*((len(prompt), length) for prompt, length in trace), strict=True)
    )
    where, day = environment(), datetime.datetime.now(datetime.UTC).date()
    first = _first(answers)
    columns = [each for each in first.seconds if each != TRACE]
    titles = [f"{each}, ms" for each in columns]
    rows = [["engine", "output tokens/s", "ratio", "equal outputs", *titles, "version"]]
    first_seconds = best(next(iter(answers.values())), TRACE).median
    for name, modes in answers.items():
        all_requests = best(modes, TRACE)
        any_answer = modes[all_requests.mode][0]
        equal = sum(
            output == other for output, other in zip(any_answer.outputs, first.outputs, strict=True)
        )
        low, middle, high = (
            num_output / seconds
            for seconds in (all_requests.highest, all_requests.median, all_requests.lowest)
        )
        speed = f"{middle:.0f} ({low:.0f} to {high:.0f}) {all_requests.mode}".strip()
        ratio = f"{first_seconds / all_requests.median:.2f}"
        numbers = [best(modes, column).milliseconds() for column in columns]
        rows.append([name, speed, ratio, f"{equal} of {len(trace)}", *numbers, any_answer.version])
    lines = [table_row(row) for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    machine = f"commit {str(where['commit'])[:7]}, {where['cores']} cores ({where['cpu']})"
    words = ["python", "tools/compare_engines.py", f"models/{model}"]
    words += ["--engines", *answers] if list(answers) != list(CASES) else []
    for peer, path in arguments.python:
        words += ["--python", f"{peer}={Path(path).name}"]
    words += ["--num-prompts", f"{len(trace)}", "--batches", *map(str, arguments.batches)]
    words += ["--context", f"{arguments.context}", "--steps", f"{arguments.steps}"]
    words += ["--prompt", f"{arguments.prompt}", "--repeats", f"{arguments.repeats}"]
    until = arguments.context + arguments.steps
    peers = dict.fromkeys(CASES[name][0] for name in answers)
    legend = [LEGEND[peer] for peer in peers if peer in LEGEND]
    return "\n".join(
        [
            f"`{shlex.join(words)}`, {day}, {machine}.",
            f"{model}: requests ({len(trace)}) with lengths of `sharegpt`, {num_input:,} tokens in,",
            f"{num_output:,} out, all at once; milliseconds of a decode step at a context of",
            f"{arguments.context} to {until}, and of a prompt of {arguments.prompt:,} tokens.",
            f"Medians over rounds ({arguments.repeats}), with the lowest and the highest.",
            *([f"Best mode of each number: {'; '.join(legend)}."] if legend else []),
            "",
            *lines,
        ]
    )


def _first(answers: Answers) -> Answer:
    """Returns the first answer of the first case, which has all numbers."""
    first_modes = next(iter(answers.values()))
    return next(iter(first_modes.values()))[0]


def replace_section(text: str, section: str) -> str:
    """Returns the text with this section between the marks."""
    before, marker, below = text.partition(BEGIN)
    _, ended, after = below.partition(END)
    if not (marker and ended):
        raise SystemExit(f"the file has no section between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{after}"


def draw(answers: Answers, path: str) -> None:
    """Draws the tokens per second of decode, with 1 and with 16 rows where they were measured."""
    from matplotlib.figure import Figure

    names = list(answers)[::-1]
    first = _first(answers)
    panels = [rows for rows in (1, 16) if rows_name(rows) in first.seconds]
    figure = Figure(figsize=(9, 0.8 + 0.35 * len(names)), layout="constrained")
    for axes, rows in zip(
        figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True
    ):
        bars = axes.barh(
            names,
            [rows / best(answers[name], rows_name(rows)).median for name in names],
            color=["#2f6fde" if name.startswith("jaxpage") else "#b9bec8" for name in names],
        )
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.margins(x=0.15)
        axes.set_title(rows_name(rows))
        axes.set_xlabel("output tokens per second")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
