"""Draws the results of `jaxpage bench speculation` as bars: one for each way to draft and task.

It needs matplotlib, as `memory_plot` does.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from jaxpage.bench.studies.speculation import NONE, Cell

# The colours are those of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#999999")


def draw(cells: Sequence[Cell]) -> Figure:
    """Returns the picture, which has a panel for each batch.

    A bar shows the tokens per second as a ratio to those without drafts. A line is drawn at 1.

    Args:
        cells: The results. Those without drafts are left out.
    """
    drafting = [cell for cell in cells if cell.method != NONE]
    tasks = list(dict.fromkeys(cell.task for cell in drafting))
    batches = list(dict.fromkeys(cell.batch for cell in drafting))
    ways = list(dict.fromkeys(cell.way for cell in drafting))
    ratios = {(cell.batch, cell.task, cell.way): cell.ratio for cell in drafting}
    figure = Figure(figsize=(9.6, 2.4 * len(batches) + 0.6), dpi=150, layout="constrained")
    height = 0.8 / len(ways)
    panels = figure.subplots(len(batches), 1, sharex=True, squeeze=False)[:, 0]
    for axes, batch in zip(panels, batches, strict=True):
        for index, way in enumerate(ways):
            bars = axes.bar(
                [number + index * height for number in range(len(tasks))],
                [ratios.get((batch, task, way), 0.0) for task in tasks],
                width=height,
                color=COLOURS[index % len(COLOURS)],
                label=way if batch == batches[0] else None,
            )
            axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
        axes.axhline(1.0, color="black", linewidth=0.8, linestyle=(0, (4, 2)))
        axes.set_ylabel("1 sequence" if batch == 1 else f"{batch} sequences")
        axes.spines[["top", "right"]].set_visible(False)
    middle = 0.4 - height / 2
    panels[-1].set_xticks([index + middle for index in range(len(tasks))], tasks)
    figure.supylabel("tokens per second, as a ratio to no drafts", fontsize=9)
    figure.legend(loc="outside upper left", ncols=len(ways), frameon=False, fontsize=9)
    return figure
