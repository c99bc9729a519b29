"""Draws the panels of a figure; this module alone needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from tools.lab.paper.results import Figure, Panel, Series

# Colours of the palette of Okabe and Ito, which differ for every eye. The last one is the engine's
# in figures that compare systems.
COLOURS = ("#999999", "#E69F00", "#56B4E9", "#009E73", "#D55E00")
PAPER_COLOUR = "#DDDDDD"
MARKERS = "ov^sD"
# The same numbers give the same file; text is kept as text, which makes files small.
matplotlib.rcParams.update({"svg.hashsalt": "jaxpage", "svg.fonttype": "none", "font.size": 9})
MAX_COLUMNS = 3


def save(figure: Figure, directory: Path, formats: Sequence[str]) -> None:
    """Writes figureNAME.FORMAT for each format; a figure without panels has no picture."""
    if not figure.panels:
        return
    columns = min(len(figure.panels), MAX_COLUMNS)
    rows = -(-len(figure.panels) // columns)
    canvas = Canvas(figsize=(1.2 + 3.6 * columns, 0.4 + 2.9 * rows), dpi=120, layout="constrained")
    grid = list(canvas.subplots(rows, columns, squeeze=False).flat)
    for panel, axes in zip(figure.panels, grid, strict=False):
        _draw(panel, axes)
    for axes in grid[len(figure.panels) :]:
        axes.set_visible(False)
    _draw_legends(canvas, columns)
    canvas.suptitle(f"Figure {figure.name}: {figure.title}  ·  {figure.origin}", fontsize=10)
    for form in formats:
        metadata = {"Date": None} if form == "svg" else None
        canvas.savefig(directory / f"figure{figure.name}.{form}", metadata=metadata)


def _draw(panel: Panel, axes: Axes) -> None:
    axes.set_title(panel.title, fontsize=9)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.bars:
        _draw_bars(panel, axes)
    else:
        _draw_lines(panel, axes)


def _draw_legends(canvas: Canvas, columns: int) -> None:
    """Draws one legend below all panels where they show the same, else one in each panel."""
    shown = [axes for axes in canvas.axes if axes.get_visible()]
    handles, labels = shown[0].get_legend_handles_labels()
    if all(axes.get_legend_handles_labels()[1] == labels for axes in shown):
        canvas.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=2 * columns,
            fontsize=8,
            frameon=False,
        )
        return
    for axes in shown:
        axes.legend(fontsize=7, frameon=False)


def _draw_lines(panel: Panel, axes: Axes) -> None:
    for index, series in enumerate(panel.series, start=len(COLOURS) - len(panel.series)):
        axes.errorbar(
            series.x,
            series.y,
            yerr=_errors(series),
            label=series.label,
            color=COLOURS[index],
            marker=MARKERS[index],
            markersize=3.5,
            elinewidth=0.6,
            capsize=1.5,
        )
    if panel.log_x:
        sizes = panel.series[0].x
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, panel.y_limit)


def _draw_bars(panel: Panel, axes: Axes) -> None:
    width = 0.7 if panel.stacked else 0.8 / len(panel.series)
    bottoms = [0.0] * len(panel.bars)
    colours = iter(COLOURS[1:])
    for index, series in enumerate(panel.series):
        colour = PAPER_COLOUR if series.is_paper else next(colours)
        shift = 0.0 if panel.stacked else (index - (len(panel.series) - 1) / 2) * width
        places = [x + shift for x in series.x]
        bottom = bottoms if panel.stacked else None
        axes.bar(
            places,
            series.y,
            width,
            bottom=bottom,
            yerr=_errors(series),
            label=series.label,
            color=colour,
            capsize=2,
        )
        bottoms = [low + height for low, height in zip(bottoms, series.y, strict=True)]
    axes.set_xticks(range(len(panel.bars)), panel.bars, rotation=20, ha="right", fontsize=7)


def _errors(series: Series) -> Sequence[float] | None:
    return series.errors if any(series.errors) else None
