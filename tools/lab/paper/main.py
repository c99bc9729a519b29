"""Draws the figures of the paper: the program of `tools/reproduce_paper.py`."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tools.lab.paper.block_sizes import MeasureAttention, figure_18, figure_19
from tools.lab.paper.document import document
from tools.lab.paper.effort import Effort
from tools.lab.paper.memory_figures import memory_figures, table_1
from tools.lab.paper.pool import Pool
from tools.lab.paper.results import Figure
from tools.lab.paper.serving_figures import figure_12, figure_14, figure_16, figure_17
from tools.lab.paper.sharing_figures import decode, figure_15

NAMES = ("table1", "2", "12", "13", "14", "15", "16", "17", "18", "19")
MEASURED = ("18", "19")
DOCS = Path("docs")

T = TypeVar("T")


def main(words: Sequence[str] | None = None, *, measure_attention: MeasureAttention) -> int:
    """Writes the document and its pictures; the status is 1 if a tolerance fails."""
    parser = _parser()
    arguments = parser.parse_args(words)
    expected = arguments.figures.split(",") if arguments.figures else list(NAMES)
    if unknown := set(expected) - set(NAMES):
        parser.error(f"--figures: {', '.join(sorted(unknown))} not among {', '.join(NAMES)}")
    if arguments.docs and (arguments.figures or arguments.quick):
        parser.error(
            "--docs writes all figures, with three seeds: it goes with neither --figures nor --quick"
        )
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the pictures need matplotlib: pip install 'jaxpage[plot]'")
    if arguments.processes < 1:
        parser.error(f"--processes must be at least 1, got {arguments.processes}")
    try:
        _pictures(arguments).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    with Pool(arguments.processes) as pool:
        effort = Effort(pool, arguments.quick)
        figures = _figures(effort, expected, measure_attention)
    _write(arguments, effort, figures)
    failed = [check for figure in figures for check in figure.checks if not check.holds]
    for check in failed:
        print(
            f"{check.name}: {check.value:.2f} is not in {check.low:.2f} to {check.high:.2f}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reproduce_paper.py", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--quick",
        action="store_true",
        help="one seed, shorter windows, fewer panels: under two minutes",
    )
    add(
        "--out",
        type=Path,
        default=Path("paper"),
        metavar="DIR",
        help="for paper.md and the pictures; default: paper",
    )
    add(
        "--figures",
        metavar="LIST",
        help=f"some of them, comma-separated: {','.join(NAMES)}; default: all",
    )
    add("--docs", action="store_true", help="write docs/paper.md and docs/images/paper/ instead")
    add(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="default: one for each core",
    )
    return parser


def _figures(
    effort: Effort, expected: Sequence[str], measure_attention: MeasureAttention
) -> list[Figure]:
    """Returns the figures in the order in which they are asked for, and prints progress.

    Figures that are only computed share the processes, so that no process waits for the longest run
    of a figure. Figures that measure the machine come when the processes are idle.
    """
    started = time.monotonic()
    memory = _once(lambda: memory_figures(effort))
    decoded = _once(lambda: decode(effort))
    makers: dict[str, Callable[[], Figure]] = {
        "table1": table_1,
        "2": lambda: memory()[0],
        "12": lambda: figure_12(effort),
        "13": lambda: memory()[1],
        "14": lambda: figure_14(effort, decoded().ancestries),
        "15": lambda: figure_15(effort, decoded()),
        "16": lambda: figure_16(effort),
        "17": lambda: figure_17(effort),
        "18": lambda: figure_18(effort, measure_attention),
        "19": lambda: figure_19(effort),
    }
    assert tuple(makers) == NAMES
    figures: dict[str, Figure] = {}

    def note_figure(name: str, figure: Figure) -> None:
        figures[name] = figure
        print(f"figure {name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(len(makers) if effort.pool.num_processes > 1 else 1) as threads:
        for name, figure in [
            (name, threads.submit(makers[name])) for name in expected if name not in MEASURED
        ]:
            note_figure(name, figure.result())
    for name in expected:
        if name in MEASURED:
            note_figure(name, makers[name]())
    return [figures[name] for name in expected]


def _once(make: Callable[[], T]) -> Callable[[], T]:
    """Returns a function that makes a value once, in one thread, and returns it at every call."""
    lock, cached = threading.Lock(), functools.cache(make)

    def get() -> T:
        with lock:
            return cached()

    return get


def _pictures(arguments: argparse.Namespace) -> Path:
    return DOCS / "images" / "paper" if arguments.docs else Path(arguments.out)


def _write(arguments: argparse.Namespace, effort: Effort, figures: Sequence[Figure]) -> None:
    from tools.lab.paper.plots import save

    directory, formats = (DOCS, ["svg"]) if arguments.docs else (arguments.out, ["png", "svg"])
    for figure in figures:
        save(figure, _pictures(arguments), formats)
    images = "images/paper/{}.svg" if arguments.docs else "{}.png"
    command = "python tools/reproduce_paper.py" + (
        " --quick" if arguments.quick else " --docs" if arguments.docs else ""
    )
    text = document(figures, command=command, effort=effort.text, images=images)
    (directory / "paper.md").write_text(text, encoding="utf-8")
    print(directory / "paper.md")
