"""Compares a result with an earlier one, for `bench throughput` and `bench latency`.

`--compare BASELINE.json` shows the ratio of output tokens per second, with the spread of both runs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jaxpage.errors import UsageError
from jaxpage.settings.argument_checks import show
from jaxpage.settings.engine_config import NO_LOG

_Count = Annotated[int, Field(ge=1, lt=10**12)]
_Seconds = Annotated[float, Field(gt=0, lt=10**9)]


class ComparedFields(BaseModel):
    """Holds the fields of a result that a comparison reads; a result may have others."""

    # Without these, "1" would pass for a number, and NaN for a time.
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Config(ComparedFields):
    model: str


class _Environment(ComparedFields):
    commit: str | None = None


class _Throughput(ComparedFields):
    duration: _Seconds
    durations: list[_Seconds] = Field([])
    dataset: str
    seed: int
    completed: _Count
    max_input: _Count
    max_output: _Count
    total_input_tokens: _Count
    total_output_tokens: _Count
    config: _Config
    environment: _Environment


class _Latency(ComparedFields):
    latencies: list[_Seconds] = Field(min_length=1)
    batch_size: _Count
    input_len: _Count
    output_len: _Count
    seed: int
    config: _Config
    environment: _Environment


_RESULTS: dict[str, type[ComparedFields]] = {"throughput": _Throughput, "latency": _Latency}


@dataclass(frozen=True)
class Comparison:
    """Holds the output tokens per second of this run over those of the baseline.

    Runs are noisy: a ratio means something if its whole range is on one side of 1.

    Attributes:
        baseline: The file of the baseline, with its commit.
        ratio: The ratio of the medians.
        lowest: The lowest ratio that the single runs allow.
        highest: The highest ratio that the single runs allow.
        notes: The differences between the runs besides jaxpage itself.
    """

    baseline: str
    ratio: float
    lowest: float
    highest: float
    notes: tuple[str, ...]

    def describe(self) -> str:
        """Returns the comparison as text."""
        shown = (
            f"{self.ratio:.3f} times the output tokens/s of {self.baseline} ({self.lowest:.3f} to "
            f"{self.highest:.3f})"
        )
        return "\n".join([shown, *self.notes])

    def as_dict(self) -> dict[str, Any]:
        """Returns the comparison as the fields of a result."""
        return {
            "baseline": self.baseline,
            "ratio": self.ratio,
            "lowest": self.lowest,
            "highest": self.highest,
        }


def read_baseline(path: str, kind: str = "throughput") -> dict[str, Any]:
    """Returns a result that `--output-json` wrote.

    Raises:
        UsageError: The file is something else; the message has the wrong field and what it must be.
    """
    return read_result(path, kind, _RESULTS[kind])


def read_result(path: str, kind: str, fields: type[ComparedFields]) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        UsageError: There is no such file, or one of the fields is missing or has a wrong value.
    """
    no_result = f"so it is no result of `jaxpage bench {kind} --output-json`"
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--compare {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"--compare {path}: the file is not JSON, {no_result}") from None
    try:
        fields.model_validate(result if isinstance(result, dict) else {})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        # pydantic says "Input should be a valid dictionary or instance of _Config".
        must = first["msg"].partition(" should ")[2].partition(" or instance of ")[0]
        wrong = f"{name} must {must}, got {show(first['input'])}"
        reason = f"the file has no {name!r}" if first["type"] == "missing" else wrong
        raise UsageError(f"--compare {path}: {reason}, {no_result}") from None
    return dict(result)


def check_same_work(path: str, baseline: Mapping[str, Any], work: Mapping[str, Any]) -> None:
    """Raises UsageError if the baseline did other work.

    Args:
        path: The file of the baseline.
        baseline: The result in it.
        work: The known properties of the work, under the names of the result, and `model`.
    """
    # The directory of the model may be another one on another machine.
    before = {**baseline, "model": Path(baseline["config"]["model"]).name}
    other = [
        f"{name} {before[name]!r}, now {value!r}"
        for name, value in work.items()
        if before[name] != value
    ]
    if other:
        raise UsageError(
            f"--compare {path}: that was other work: {'; '.join(other)}. Use the same flags for "
            "both runs"
        )


def compare(path: str, baseline: Mapping[str, Any], result: Mapping[str, Any]) -> Comparison:
    """Returns the comparison of two results as `--output-json` writes them."""
    theirs = _speeds(baseline)
    ours = _speeds(result)
    before = baseline["environment"]
    now = result["environment"]
    commit = f" (commit {before['commit'][:7]})" if before.get("commit") else ""
    notes = [
        f"other {name}: {before.get(name)}, now {now.get(name)}"
        for name in ("python", "jax", "device", "cpu", "cores")
        if before.get(name) != now.get(name)
    ]
    notes += [
        f"other {name}: {baseline[name]}, now {result[name]}"
        for name in ("effective_dtype", "effective_kv_cache_dtype")  # older results have none
        if name in baseline and name in result and baseline[name] != result[name]
    ]
    settings = {*baseline["config"], *result["config"]} - {"model", *NO_LOG}
    notes += [
        f"other {name}: {baseline['config'].get(name)}, now {result['config'].get(name)}"
        for name in sorted(settings)
        if baseline["config"].get(name) != result["config"].get(name)
    ]
    if min(len(ours), len(theirs)) == 1:
        notes.insert(
            0, "one run has no spread: use --repeats for both, and work that takes some seconds"
        )
    # For an even number of runs, the slower of the two in the middle is shown, as `bench
    # throughput` shows it; for latencies the median.
    middle = statistics.median if "latencies" in result else statistics.median_low
    return Comparison(
        f"{path}{commit}",
        middle(ours) / middle(theirs),
        min(ours) / max(theirs),
        max(ours) / min(theirs),
        tuple(notes),
    )


def _speeds(result: Mapping[str, Any]) -> Sequence[float]:
    """Returns the output tokens per second of each run, or of each batch of a latency result."""
    if "latencies" in result:
        return [
            result["batch_size"] * result["output_len"] / seconds for seconds in result["latencies"]
        ]
    return [
        result["total_output_tokens"] / seconds
        for seconds in result.get("durations") or [result["duration"]]
    ]
