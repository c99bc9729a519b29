"""Measures the blocks that samples and beams share: figure 15, by real decoding.

The decoding also shows which beams survive, which figure 14 uses.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpage import LLM
from jaxpage.bench.workloads import WorkItem, make_workload
from jaxpage.simulation.beams import Ancestry
from tools.lab.paper.effort import Effort
from tools.lab.paper.measured_sharing import WIDTHS, measure, write_prompts
from tools.lab.paper.results import Figure, Interval, Panel, Row, Series
from tools.lab.paper.simulated_cases import PAGED, Case, Workload, run_case

METHODS = PARALLEL, BEAM = "parallel sampling", "beam search"
PAPER = {  # percent; for ShareGPT the text gives only the ends
    (PARALLEL, "alpaca"): "6.09 / 8.53 / 9.79",
    (PARALLEL, "sharegpt"): "16.2 to 30.5",
    (BEAM, "alpaca"): "37.56 / 53.13 / 55.16",
    (BEAM, "sharegpt"): "44.3 to 66.3",
}
# Requests per second of the simulated runs; they are so low that nothing is preempted.
RATES = {"alpaca": 4.0, "sharegpt": 0.3}
NUM_PROMPTS, QUICK_NUM_PROMPTS = 16, 8  # prompts of each seed
MAX_LENGTH = 256  # tokens of a prompt, and of an output: the demo model takes 512


Key = tuple[str, str, int]  # method, dataset, width
Savings = Mapping[Key, Interval]  # percent


@dataclass(frozen=True)
class Decoded:
    """Holds the results of real decoding with the demo model.

    Attributes:
        savings: The saved shares of blocks, 0 to 1, by seed.
        ancestries: The ancestries of beams, by width.
    """

    savings: Mapping[Key, Sequence[float]]
    ancestries: Mapping[int, Sequence[Ancestry]] = field(default_factory=dict)


def decode(effort: Effort) -> Decoded:
    """Decodes with both methods prompts that the model has written.

    Their lengths are those of both datasets.
    """
    num_prompts = QUICK_NUM_PROMPTS if effort.quick else NUM_PROMPTS
    savings: dict[Key, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log.jsonl"
        llm = LLM(
            "demo",
            enable_prefix_caching=False,
            max_num_seqs=4 * max(WIDTHS),
            event_log=str(log),
            dtype="float32",
            use_tqdm=False,
            verbose=False,
        )
        with llm:
            for dataset, seed in itertools.product(RATES, effort.seeds):
                workload = write_prompts(llm, _workload(dataset, seed, num_prompts))
                for method, width in itertools.product(METHODS, WIDTHS):
                    saving = measure(llm, workload, method, width)
                    savings.setdefault((method, dataset, width), []).append(saving.saved_by_sharing)
        return Decoded(savings, read_ancestries(log))


def _workload(dataset: str, seed: int, num_prompts: int) -> list[WorkItem]:
    return make_workload(
        dataset,
        num_prompts,
        seed=seed,
        vocab_size=2048,
        max_input=MAX_LENGTH,
        max_output=MAX_LENGTH - 1,
    )


def read_ancestries(log: Path) -> dict[int, list[Ancestry]]:
    """Returns which beams survived in the beam searches of an event log, by their width."""
    searches: dict[int, _Search] = {}  # by sequence id
    ancestries: dict[int, list[Ancestry]] = {}
    with log.open(encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            if record["event"] == "arrival" and "beam" in record:
                search = _Search(record["beam"]["beam_width"], record["sequences"])
                searches |= dict.fromkeys(record["sequences"], search)
                ancestries.setdefault(search.width, []).append(search.steps)
            elif record["event"] == "plan":
                drawing = {
                    id(searches[row[0]]): searches[row[0]]
                    for row in record["rows"]
                    if row[0] in searches
                }
            elif record["event"] == "result":
                for search in drawing.values():
                    search.step(record.get("edits", ()))
    return ancestries


class _Search:
    """Follows the beams of a request through the edits of its steps."""

    def __init__(self, width: int, sequence_ids: Sequence[int]) -> None:
        self.width = width
        self.steps: list[list[tuple[int, int]]] = []
        self._sequence_ids = set(sequence_ids)
        self._beams: list[int] = []  # by place; empty before the prompt is computed

    def step(self, edits: Sequence[Sequence[Any]]) -> None:
        """Takes the edits of a step."""
        own_edits = [edit for edit in edits if edit[1] in self._sequence_ids]
        forks = [(edit[1], edit[2]) for edit in own_edits if edit[0] == "fork"]
        if any(edit[0] == "finish" for edit in own_edits):
            self._sequence_ids.clear()
        elif not self._beams:
            if forks:
                self._beams = [forks[0][0], *(child for _, child in forks)]
        elif self._sequence_ids:
            dropped = [self._beams.index(edit[1]) for edit in own_edits if edit[0] == "drop"]
            parents = [self._beams.index(parent) for parent, _ in forks]
            self.steps.append(list(zip(dropped, parents, strict=True)))
            for place, (_, child) in zip(dropped, forks, strict=True):
                self._beams[place] = child


def figure_15(effort: Effort, decoded: Decoded) -> Figure:
    """Makes figure 15 from the decoded and from simulated runs."""
    keys = list(itertools.product(METHODS, RATES, WIDTHS, effort.seeds))
    jobs = []
    for method, dataset, width, seed in keys:
        work = Workload(dataset, width, is_beam_search=method == BEAM)
        ancestries = decoded.ancestries if method == BEAM else {}
        jobs.append(
            (
                Case(PAGED, work, effort.window(dataset) / 2, seed, ancestries=ancestries),
                RATES[dataset],
            )
        )
    by_key: dict[Key, list[float]] = {}
    for (method, dataset, width, _), outcome in zip(
        keys, effort.pool.map(run_case, jobs), strict=True
    ):
        by_key.setdefault((method, dataset, width), []).append(outcome.mean.saved_by_sharing)
    measured, simulated = (
        {key: Interval.of(100 * value for value in values) for key, values in each.items()}
        for each in (decoded.savings, by_key)
    )
    rows, panels = [], []
    for part, method in zip("ab", METHODS, strict=True):
        for dataset in RATES:
            texts = [
                " / ".join(savings[method, dataset, width].text(1) for width in WIDTHS)
                for savings in (measured, simulated)
            ]
            row = Row(
                f"{part}) {method} of {' / '.join(map(str, WIDTHS))}, {dataset}: saved blocks (%)",
                PAPER[method, dataset],
                f"{texts[0]} decoded; {texts[1]} simulated",
            )
            rows.append(row)
        panels.append(_panel(f"({part}) {method}", method, measured, simulated))
    return Figure(
        "15", "Memory saved by sharing", "measured by real decoding, and simulated", rows, panels
    )


def _panel(title: str, method: str, decoded: Savings, simulated: Savings) -> Panel:
    columns = [(method, dataset, width) for dataset in RATES for width in WIDTHS]
    series = [
        Series(
            label,
            range(len(columns)),
            [savings[c].mean for c in columns],
            [savings[c].half for c in columns],
        )
        for label, savings in (("decoded, demo model", decoded), ("simulated", simulated))
    ]
    return Panel(
        title,
        "",
        "saved blocks (%)",
        series,
        [f"{dataset} {width}" for _, dataset, width in columns],
    )
