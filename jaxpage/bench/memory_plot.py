"""Draws a memory report: what the KV pool held over time, with an area for each kind of slots.

It needs matplotlib; of the other modules only `serve_plot` does.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from jaxpage.memory import MemoryReport

# The colours are those of Okabe and Ito, which colour-blind readers can tell apart. Free memory is
# nearly white.
COLOURS = {
    "token states": "#0072B2",
    "reserved": "#E69F00",
    "internal fragmentation": "#D55E00",
    "free": "#EFEFEF",
}


def draw(report: MemoryReport, *, title: str) -> Figure:
    """Returns the picture of a report that has at least one sample.

    `savefig` writes it in the format of the file's suffix.
    """
    figure = Figure(figsize=(9.6, 5.0), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=13, pad=28)
    _draw_areas(axes, report)
    counts = f"{report.num_steps:,} steps, {report.num_preemptions:,} preemptions"
    axes.set_xlabel(
        f"time in steps (s)   ·   {counts}   ·   shares in the legend: means over this time"
    )
    axes.set_ylabel(f"KV pool of {report.num_blocks:,} blocks × {report.block_size} slots")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    above = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1), "ncols": 5, "frameon": False}
    axes.legend(**above, fontsize=9, columnspacing=1.2, handlelength=1.2)
    return figure


def _draw_areas(axes: Axes, report: MemoryReport) -> None:
    """Draws the areas. Each sample holds until the next, so that areas match the legend's means."""
    splits = [sample.split for sample in (*report.samples, report.samples[-1])]
    seconds = [*(sample.seconds for sample in report.samples), report.seconds]
    means = report.mean_shares
    axes.stackplot(
        seconds,
        [[split.kinds[kind] / split.num_slots for split in splits] for kind in means],
        labels=[f"{kind} {mean:.1%}" for kind, mean in means.items()],
        colors=[COLOURS[kind] for kind in means],
        step="post",
        linewidth=0,
    )
    axes.set_ylim(0, 1)
    if report.saved_by_sharing:
        unshared = [split.unshared_blocks / report.num_blocks for split in splits]
        label = f"without sharing (saved {report.saved_by_sharing:.1%})"
        axes.step(
            seconds,
            unshared,
            where="post",
            color="black",
            linewidth=1.2,
            linestyle=(0, (4, 2)),
            label=label,
        )
        axes.set_ylim(0, max(1, *(1.02 * share for share in unshared)))
