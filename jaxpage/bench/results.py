"""Shows measurements: a table for people, and one JSON line with vLLM's key names for programs.

It also describes where something was measured.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxpage import __version__
from jaxpage.bench.workloads import WorkItem
from jaxpage.device.hardware import processor
from jaxpage.memory import MemoryReport
from jaxpage.settings.engine_config import NO_LOG
from jaxpage.tables import align

COMPARABLE_SECONDS = 2.0  # equal runs of this length mostly differ by less than a tenth


@dataclass(frozen=True)
class Measurement:
    """Holds the measurement of one engine on one workload. All times are seconds.

    Attributes:
        engine: The name of the engine.
        completed: The number of requests.
        total_input_tokens: The tokens of all prompts.
        total_output_tokens: The tokens of all outputs.
        duration: The time of the run alone, without loading, compilation and warm-up.
        load_seconds: The time of the start-up without compilation.
        compile_seconds: The time of compilation, or None where it is part of `load_seconds`.
        warmup_seconds: The time of the warm-up.
        durations: The durations of every run; `duration` is their median.
        outputs: The token ids of each output.
        details: Other fields of the result.
        memory: The use of the KV pool.
    """

    engine: str
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    duration: float
    load_seconds: float
    compile_seconds: float | None = None
    warmup_seconds: float = 0.0
    durations: Sequence[float] = ()
    outputs: Sequence[Sequence[int]] = ()
    details: dict[str, Any] | None = None
    memory: MemoryReport | None = None

    @classmethod
    def of(
        cls,
        engine: str,
        workload: Sequence[WorkItem],
        outputs: Sequence[Sequence[int]],
        **fields: Any,
    ) -> Measurement:
        """Returns a measurement, if the work was done as asked: a shorter output would look faster.

        Raises:
            RuntimeError: An output has another length than its request asked for.
        """
        for index, (item, output) in enumerate(zip(workload, outputs, strict=True)):
            if len(output) != item.num_output_tokens:
                raise RuntimeError(
                    f"{engine} gave {len(output)} tokens for request {index}, not "
                    f"{item.num_output_tokens}"
                )
        return cls(
            engine=engine,
            completed=len(outputs),
            total_input_tokens=sum(len(item.prompt_token_ids) for item in workload),
            total_output_tokens=sum(len(output) for output in outputs),
            outputs=outputs,
            **fields,
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the measurement under the names of vLLM's benchmark results."""
        return {
            "engine": self.engine,
            "completed": self.completed,
            "duration": self.duration,
            **({"durations": list(self.durations)} if len(self.durations) > 1 else {}),
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.completed / self.duration,
            "output_throughput": self.total_output_tokens / self.duration,
            "total_token_throughput": (self.total_input_tokens + self.total_output_tokens)
            / self.duration,
            "load_seconds": self.load_seconds,
            **({} if self.compile_seconds is None else {"compile_seconds": self.compile_seconds}),
            "warmup_seconds": self.warmup_seconds,
            **(self.details or {}),
            **({"kv_memory": self.memory.as_dict()} if self.memory else {}),
        }


_ROWS = (
    ("requests", "completed", "d"),
    ("input tokens", "total_input_tokens", "d"),
    ("output tokens", "total_output_tokens", "d"),
    ("duration (s)", "duration", ".2f"),
    ("requests/s", "request_throughput", ".2f"),
    ("output tokens/s", "output_throughput", ".1f"),
    ("total tokens/s", "total_token_throughput", ".1f"),
    ("load (s)", "load_seconds", ".2f"),
    ("compile (s)", "compile_seconds", ".2f"),
    ("preemptions", "num_preemptions", "d"),
    ("prompt tokens from the prefix cache", "prefix_cache_hit_rate", ".0%"),
    ("tokens per step of a row", "tokens_per_target_step", ".2f"),
    ("drafts", "num_draft_tokens", "d"),
    ("drafts accepted", "num_accepted_tokens", "d"),
    ("warm-up (s)", "warmup_seconds", ".2f"),
)


def too_short(measurements: Sequence[Measurement]) -> str:
    """Returns a line that warns of runs whose times are too short to compare, or ""."""
    min_seconds = min(measurement.duration for measurement in measurements)
    if len(measurements) < 2 or min_seconds >= COMPARABLE_SECONDS:
        return ""
    return (
        f"Do not compare the times: a run of {min_seconds:.2f} s is too short. To compare them "
        "give more or longer requests, so "
        f"that each run takes {COMPARABLE_SECONDS:g} s or more (--num-prompts, "
        "--max-output), or --repeats\n"
    )


def table(measurements: Sequence[Measurement]) -> str:
    """Returns a table with a column for each engine."""
    columns = [measurement.as_dict() for measurement in measurements]
    rows = [["", *(column["engine"] for column in columns)]]
    for label, key, form in _ROWS:
        rows.append(
            [label, *(format(column[key], form) if key in column else "-" for column in columns)]
        )
    return "\n".join(align(rows, num_words=1))


def as_result(measurements: Sequence[Measurement], **context: Any) -> dict[str, Any]:
    """Returns the result of a benchmark.

    The first measurement's numbers are at the top level, the others under `baselines`. Where and
    how it was run is added.
    """
    first, *others = measurements
    result = {**first.as_dict(), **context, "environment": environment()}
    if others:
        result["baselines"] = [other.as_dict() for other in others]
        result["identical_outputs"] = num_identical(measurements)
    return result


def print_result(result: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Prints the last line of a benchmark, one JSON object for programs, and writes it to a file.

    On a terminal, whose reader has the tables, it is printed only with `--json`.

    Args:
        result: The fields of the object.
        arguments: The flags `json` and `output_json`; the latter is the name of the file or None.
    """
    hashes = {
        f"{name}_hash": fingerprint(result[name])
        for name in ("config", "environment")
        if result.get(name)
    }
    # NaN and Infinity are no JSON, and most parsers refuse them.
    line = json.dumps({**result, **hashes}, allow_nan=False)
    if arguments.output_json:
        Path(arguments.output_json).write_text(line + "\n", encoding="utf-8")
    if arguments.json or not sys.stdout.isatty():
        print(line)


def fingerprint(values: Mapping[str, Any]) -> str:
    """Returns a short hash that is equal for equal settings, or for equal environments.

    The commit and the event log do not count, so that a reader sees at a glance what can be
    compared.
    """
    compared = {name: value for name, value in values.items() if name not in ("commit", *NO_LOG)}
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()[:12]


def num_identical(measurements: Sequence[Measurement]) -> list[int]:
    """Returns how many outputs of the first measurement each of the other measurements has too."""
    first, *others = measurements
    return [
        sum(list(a) == list(b) for a, b in zip(first.outputs, other.outputs, strict=True))
        for other in others
    ]


def environment(*, with_device: bool = True) -> dict[str, Any]:
    """Returns what a reader needs to know to repeat a measurement or to compare with it.

    A client has no device: asking for one would take memory of a server on the same machine.
    """
    device = jax.devices()[0] if with_device else None
    return {
        "jaxpage": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        **(
            {
                "device": f"{device.platform}: {device.device_kind}",
                "num_devices": len(jax.devices()),
            }
            if device
            else {}
        ),
        "cpu": processor() or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }


def _commit() -> str | None:
    """Returns the commit of the checkout that has this file, or None if there is none.

    A `+` at the end says that tracked files differ from it.
    """
    directory = Path(__file__).parent
    try:
        commit, changes = (
            subprocess.run(
                ["git", *words],
                cwd=directory,
                capture_output=True,
                text=True,
                check=True,
                timeout=10,
            ).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+" if changes.strip() else "")
