"""Compares a result with an earlier one, for `bench serve --compare BASELINE.json`.

It shows ratios, with the spread of the runs of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from jaxpage.bench.comparison import ComparedFields, read_result
from jaxpage.errors import UsageError
from jaxpage.tables import align


class _Numbers(ComparedFields):
    request_throughput: float
    output_throughput: float
    mean_normalized_latency_ms: float
    median_ttft_ms: float
    p99_ttft_ms: float
    # Of requests with one token there is no TPOT.
    median_tpot_ms: float | None
    p99_tpot_ms: float | None
    median_e2el_ms: float
    p99_e2el_ms: float


class _Result(_Numbers):
    runs: list[_Numbers] = Field(min_length=1)
    request_rate: float | None
    num_prompts: int


COMPARED = tuple(_Numbers.model_fields)
_WORK = (
    *(
        "dataset",
        "dataset_path",
        "num_prefixes",
        "prefix_len",
        "num_rounds",
        "seed",
        "num_prompts",
        "arrivals",
    ),
    *("request_rate", "burstiness", "max_concurrency", "max_input", "max_output"),
)


def read_baseline(path: str) -> dict[str, Any]:
    """Returns a result that `--output-json` wrote.

    Raises:
        UsageError: The file is something else.
    """
    return read_result(path, "serve", _Result)


def check_same_work(path: str, baseline: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UsageError if the baseline had other requests, or had them at other times."""
    other = [
        f"{name} {baseline.get(name)!r}, now {now.get(name)!r}"
        for name in _WORK
        if baseline.get(name) != now.get(name)
    ]
    if other:
        raise UsageError(
            f"--compare {path}: that was other work: {'; '.join(other)}. Use the same flags for "
            "both runs"
        )


def compare(baseline: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the ratios of this result to the baseline.

    Each has the ratio of the shown numbers, and the lowest and highest ratio that the single runs
    allow. A number that is 0 in the baseline, or that a run lacks, is left out.
    """
    ratios = {}
    for name in COMPARED:
        theirs, ours = ([run[name] for run in report["runs"]] for report in (baseline, result))
        if None in (*theirs, *ours, baseline[name], result[name]):
            continue
        if min(*theirs, baseline[name]) > 0:
            lowest = min(ours) / max(theirs)
            highest = max(ours) / min(theirs)
            ratios[name] = {
                "ratio": result[name] / baseline[name],
                "lowest": lowest,
                "highest": highest,
            }
    return ratios


def describe(path: str, ratios: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the ratios as a table."""
    rows = [[f"compared with {path}", "ratio", "lowest", "highest"]]
    rows += [
        [name, *(f"{value:.3f}" for value in ratio.values())] for name, ratio in ratios.items()
    ]
    return "\n".join(align(rows, num_words=1))
