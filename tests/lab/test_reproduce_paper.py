"""The paper's numbers: the quick mode of tools/reproduce_paper.py within its tolerances, and how it
reads a curve.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from tools.lab.bench_swap import SwapCost
from tools.lab.paper import block_sizes, sharing_figures
from tools.lab.paper import main as program
from tools.lab.paper.curves import highest_rate
from tools.lab.paper.document import document
from tools.lab.paper.effort import Effort
from tools.lab.paper.plots import save
from tools.lab.paper.pool import Pool
from tools.lab.paper.results import Check, Figure, Interval, Row
from tools.lab.paper.simulated_cases import PAGED, Case, Outcome, Workload, run_case
from tools.reproduce_paper import measure_attention


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    """Returns the status, the document and the directory of one run."""
    directory = tmp_path_factory.mktemp("paper")
    words = ["--quick", "--figures", "table1,2,13", "--out", str(directory), "--processes", "1"]
    status = program.main(words, measure_attention=lambda contexts, rows: [])
    return status, (directory / "paper.md").read_text(), directory


def cells(document: str, label: str) -> list[str]:
    """Returns the cells of the only row of the document that begins so."""
    [row] = [line for line in document.splitlines() if line.startswith(f"| {label}")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_quick_mode_keeps_the_tolerances(quick: tuple[int, str, Path]) -> None:
    status, document, _ = quick
    assert status == 0
    assert "**fails**" not in document and document.count("| holds |") == 23


@pytest.mark.sweep
def test_the_quick_mode_keeps_the_tolerances_of_every_figure(tmp_path: Path) -> None:
    assert (
        program.main(["--quick", "--out", str(tmp_path)], measure_attention=measure_attention) == 0
    )
    document = (tmp_path / "paper.md").read_text()
    assert "**fails**" not in document and document.count("| holds |") > 23
    assert all(f"## Figure {number}" in document for number in (2, *range(12, 20)))


def test_the_document_has_the_paper_s_numbers(quick: tuple[int, str, Path]) -> None:
    """Figures 2 and 13 and table 1, as printed in the paper."""
    _, document, directory = quick
    for label, paper, points in (
        ("Orca (Max): token", (20.4, 13.3, 57.3, 8.9), 3),
        ("Orca (Pow2): the same", (26.8, 17.9, 13.6, 41.6), 3),
        ("Orca (Oracle): the same", (38.2, 25.2, 0.0, 36.6), 3),
        ("jaxpage: the same", (96.3,), 0.4),
    ):
        ours = [float(share) for share in cells(document, label)[2].split(" / ")]
        assert ours[: len(paper)] == pytest.approx(paper, abs=points)
        assert sum(ours) == pytest.approx(100, abs=0.2)
    for label, batched in (
        ("a) sharegpt, 2 requests/s: ", (7, 9.81, 13.62, 30.42)),
        ("b) alpaca, 30 requests/s: ", (7, 43.24, 72.75)),
    ):
        systems = ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", PAGED)
        ours = [float(cells(document, label + system)[2]) for system in systems[: len(batched)]]
        assert ours == pytest.approx(batched, rel=0.15) and ours[0] == pytest.approx(7, abs=0.02)
    slots = [
        cells(document, f"{model}: thousand slots")[2].split()[0]
        for model in ("OPT-13B", "OPT-66B", "OPT-175B")
    ]
    assert slots == ["15.7", "9.6", "60.1"]
    assert {path.name for path in directory.iterdir()} == {
        "paper.md",
        *(f"figure{n}.{f}" for n in (2, 13) for f in ("png", "svg")),
    }


def test_a_tolerance_that_fails_is_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("right", 1.0, 0.5, 1.5), Check("wrong", 2.0, 0.5, 1.5)]
    monkeypatch.setattr(
        program,
        "_figures",
        lambda *_: [Figure("2", "t", "simulated", [Row("a", "b", "c")], (), checks)],
    )
    words = ["--quick", "--out", str(tmp_path), "--processes", "1"]
    assert program.main(words, measure_attention=lambda contexts, rows: []) == 1
    assert capsys.readouterr().err == "wrong: 2.00 is not in 0.50 to 1.50\n"
    assert "| wrong | 0.50 to 1.50 | 2.00 | **fails** |" in (tmp_path / "paper.md").read_text()
    with pytest.raises(SystemExit):
        program.main(["--figures", "12,99"], measure_attention=lambda contexts, rows: [])
    assert "--figures: 99 not among table1, 2, 12" in capsys.readouterr().err


def outcome(rate: float, latency: float) -> Outcome:
    return Outcome(rate, latency, None, 1, 0, 0, 1.0)  # type: ignore[arg-type]  # only two of them are read


def test_the_highest_rate_is_where_the_curve_passes_half_a_second() -> None:
    """On logarithmic axes 0.5 is half-way between 0.25 and 1, and 2 between 1 and 4."""
    assert highest_rate(
        [outcome(0.5, 0.1), outcome(1.0, 0.25), outcome(4.0, 1.0)]
    ) == pytest.approx(2.0)
    assert highest_rate([outcome(1.0, 0.6), outcome(2.0, 0.9)]) == 1.0
    assert highest_rate([outcome(1.0, 0.1), outcome(2.0, 0.2)]) == 2.0


def test_intervals_are_student_s() -> None:
    values = [1.0, 2.0, 4.0]
    mean, half = Interval.of(values)
    assert mean == pytest.approx(7 / 3) and half == pytest.approx(
        4.303 * statistics.stdev(values) / 3**0.5
    )
    assert (
        Interval.of([3.0]).text() == "3.00" and Interval(1.0, 0.25).text(1, 100) == "100.0 ± 25.0"
    )


def test_processes_give_the_same_numbers() -> None:
    jobs = [(Case(system, Workload("sharegpt"), 20.0, 1), 2.0) for system in (PAGED, "Orca (Pow2)")]
    with Pool(1) as alone, Pool(2) as two:
        assert alone.map(run_case, jobs) == two.map(run_case, jobs)


class Tiny(Effort):
    """Two seeds of some seconds at one rate: what is drawn, not what it says."""

    @property
    def seeds(self) -> range:
        return range(2)

    @property
    def shares(self) -> tuple[float, ...]:
        return (0.5,)

    def window(self, dataset: str) -> float:
        return 20.0 if dataset in ("sharegpt", "chat") else 4.0


def test_every_figure_has_all_its_panels_and_curves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    savings = {
        key: [0.1, 0.2]
        for key in itertools.product(
            sharing_figures.METHODS, sharing_figures.RATES, sharing_figures.WIDTHS
        )
    }
    decoded = sharing_figures.Decoded(
        savings, {width: [[[], [(1, 0)]]] for width in sharing_figures.WIDTHS}
    )
    monkeypatch.setattr(program, "decode", lambda effort: decoded)
    monkeypatch.setattr(
        block_sizes, "measure_swapping", lambda model, size, **_: SwapCost(size, 1, 0.1, 0.1, 0.4)
    )
    times = [block_sizes.AttentionTime(64, 8, 120.0, 100.0)]
    names = ["12", "14", "15", "16", "17", "18", "19"]
    with Pool(1) as pool:
        figures = {
            figure.name: figure
            for figure in program._figures(Tiny(pool, False), names, lambda *_: times)
        }
    assert {name: len(figure.panels) for name, figure in figures.items()} == {
        "12": 6, "14": 6, "15": 2, "16": 2, "17": 1, "18": 2, "19": 3,
    }  # fmt: skip
    assert {name: len(figure.panels[0].series) for name, figure in figures.items()} == {
        "12": 5, "14": 4, "15": 2, "16": 2, "17": 4, "18": 2, "19": 3,
    }  # fmt: skip
    assert figures["18"].rows[0].ours == "8 x 64: +20%"
    assert (
        figures["19"].rows[1].ours.startswith("1: ")
        and "recompute 400.0" in figures["19"].rows[2].ours
    )
    assert figures["15"].panels[0].series[0].y == pytest.approx([15.0] * 6)
    for figure in figures.values():
        save(figure, tmp_path, ["svg"])
        text = (tmp_path / f"figure{figure.name}.svg").read_text()
        expected = [
            figure.title,
            *(panel.title for panel in figure.panels),
            *(s.label for s in figure.panels[0].series),
        ]
        assert [words for words in expected if words not in text] == []
    text = document(
        list(figures.values()), command="command", effort="effort", images="images/{}.svg"
    )
    assert all(
        f"## Figure {name}: " in text and f"(images/figure{name}.svg)" in text for name in names
    )
