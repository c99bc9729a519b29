"""Draws latency against the request rate: figures 12, 14, 16 and 17."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxpage.simulation.beams import Ancestry
from tools.lab.paper.curves import Comparison, Curves, compare
from tools.lab.paper.effort import Effort
from tools.lab.paper.results import Check, Figure, Row
from tools.lab.paper.simulated_cases import (
    LLAMA_13B,
    OPT_66B,
    OPT_175B,
    ORCAS,
    PAGED,
    SYSTEMS,
    Workload,
)

SHAREGPT, ALPACA = Workload("sharegpt"), Workload("alpaca")
ORCAS_AND_ENGINE = (*ORCAS, PAGED)


def _by(systems: Sequence[str], *rates: float) -> dict[str, float]:
    return dict(zip(systems, rates, strict=True))


FIGURE_12 = (
    Comparison(
        "a",
        "OPT-13B, ShareGPT",
        SHAREGPT,
        _by(SYSTEMS, 0.28, 0.63, 0.8, 1.0, 2.0),
        _by(SYSTEMS, 0.3, 0.5, 0.75, 1.1, 1.9),
    ),
    Comparison(
        "b",
        "OPT-66B, ShareGPT",
        SHAREGPT,
        _by(SYSTEMS, 0.14, 0.33, 0.5, 0.6, 1.35),
        _by(SYSTEMS, 0.1, 0.2, 0.4, 0.65, 0.95),
        OPT_66B,
    ),
    Comparison(
        "c",
        "OPT-175B, ShareGPT",
        SHAREGPT,
        _by(SYSTEMS, 0.5, 2.4, 2.8, 3.4, 5.3),
        _by(SYSTEMS, 0.5, 1, 1.5, 1.8, 2.4),
        OPT_175B,
        1 / 3,
    ),
    Comparison(
        "d",
        "OPT-13B, Alpaca",
        ALPACA,
        _by(SYSTEMS, 1.1, 3.3, 15.5, 23.5, 36),
        _by(SYSTEMS, 5, 7, 13, 20, 28),
    ),
    Comparison(
        "e",
        "OPT-66B, Alpaca",
        ALPACA,
        _by(SYSTEMS, 0.65, 1.8, 9, 13.5, 26),
        _by(SYSTEMS, 3, 5, 9, 13, 18),
        OPT_66B,
    ),
    Comparison(
        "f",
        "OPT-175B, Alpaca",
        ALPACA,
        _by(SYSTEMS, 2, 11.5, 31, 36, 46),
        _by(SYSTEMS, 4, 6, 13, 16, 20),
        OPT_175B,
        1 / 2,
    ),
)

PARALLEL, BEAM = "parallel sampling", "beam search"
# Each part has its method, width, the rates that are expected of the Orcas and the engine, and the
# rates read off the plots for Orca (Oracle) and vLLM.
_PARTS_14 = (
    ("a", PARALLEL, 2, (1.7, 8, 12, 18.5), (10, 15)),
    ("b", PARALLEL, 4, (0.55, 4.1, 6.1, 10), (6, 10)),
    ("c", PARALLEL, 6, (0.4, 3.3, 4.2, 6.6), (4, 6.5)),
    ("d", BEAM, 2, (1.7, 8, 12, 20), (10, 16)),
    ("e", BEAM, 4, (0.55, 4.1, 6.1, 11), (5.5, 9.5)),
    ("f", BEAM, 6, (0.4, 3.3, 4.2, 7.5), (4, 7)),
)
FIGURE_14 = tuple(
    Comparison(
        part,
        f"{method}, {width}",
        Workload("alpaca", width, method == BEAM),
        _by(ORCAS_AND_ENGINE, *expected),
        _by(ORCAS_AND_ENGINE[-2:], *paper),
    )
    for part, method, width, expected, paper in _PARTS_14
)

FIGURE_16 = tuple(
    Comparison(
        part,
        f"prefix of {num_tokens} tokens",
        Workload("translation", num_prefix_tokens=num_tokens),
        _by(("Orca (Oracle)", PAGED), *expected),
        {},
        LLAMA_13B,
    )
    for part, num_tokens, expected in (("a", 80, (29, 51)), ("b", 341, (12, 38)))
)
PAPER_16 = {"a": "(1.67 times)", "b": "(3.58 times)"}

FIGURE_17 = (
    Comparison(
        "a",
        "chat",
        Workload("chat"),
        _by(ORCAS_AND_ENGINE, 0.6, 0.6, 0.6, 0.8),
        _by(ORCAS_AND_ENGINE, 0.57, 0.57, 0.57, 0.78),
        share_of_window=3 / 4,
    ),
)


def figure_12(effort: Effort) -> Figure:
    """Makes figure 12."""
    expected = FIGURE_12[:1] if effort.quick else FIGURE_12
    curves = compare(effort, expected)
    ratio = curves[0].ratio("Orca (Oracle)").mean
    checks = [Check("figure 12a, highest rate over Orca (Oracle)", ratio, 1.7, 2.7)]
    return _figure("12", "Latency of single sequences", curves, checks)


def figure_14(effort: Effort, ancestries: Mapping[int, Sequence[Ancestry]]) -> Figure:
    """Makes figure 14; beam searches follow the `ancestries` of real ones."""
    expected = FIGURE_14[-1:] if effort.quick else FIGURE_14
    return _figure("14", "Parallel sampling and beam search", compare(effort, expected, ancestries))


def figure_16(effort: Effort) -> Figure:
    """Makes figure 16."""
    curves = compare(effort, FIGURE_16[-1:] if effort.quick else FIGURE_16)
    figure = _figure("16", "A prefix that requests share", curves)
    rows = [
        row if PAGED in row.what else row._replace(paper=PAPER_16[row.what[0]])
        for row in figure.rows
    ]
    return replace(figure, rows=rows)


def figure_17(effort: Effort) -> Figure:
    """Makes figure 17."""
    return _figure("17", "Chat", compare(effort, FIGURE_17))


def _figure(
    name: str, title: str, curves: Sequence[Curves], checks: Sequence[Check] = ()
) -> Figure:
    rows: list[Row] = [row for each in curves for row in each.rows()]
    return Figure(name, title, "simulated", rows, [each.panel() for each in curves], checks)
