"""Measures how long a batch takes from its prompts to its last token, for `jaxpage bench latency`.

A baseline can run next to it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxpage.bench.comparison import check_same_work, compare, read_baseline
from jaxpage.bench.measure import dtypes, parameters
from jaxpage.bench.results import environment, print_result
from jaxpage.bench.throughput import (
    baseline,
    changes_of,
    check_baseline,
    check_writable,
    start_engine,
)
from jaxpage.bench.workloads import WorkItem
from jaxpage.checkpoints import read_config
from jaxpage.checkpoints.finding import resolve_model
from jaxpage.errors import UsageError
from jaxpage.llm import LLM
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.tables import align

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class EngineLatencies:
    """Holds the seconds of every iteration of one engine.

    A baseline knows only the sum of its iterations; it has one entry, their mean.
    """

    engine: str
    seconds: tuple[float, ...]
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Returns the mean latency in seconds."""
        return sum(self.seconds) / len(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """Returns the latencies under the names of vLLM's benchmark results."""
        percentiles = (
            np.percentile(self.seconds, PERCENTILES).tolist() if len(self.seconds) > 1 else []
        )
        return {
            "engine": self.engine,
            "avg_latency": self.mean,
            "latencies": list(self.seconds),
            **self.dtypes,
            "percentiles": {
                str(percent): value
                for percent, value in zip(PERCENTILES, percentiles, strict=False)
            },
        }


def run_latency(arguments: argparse.Namespace, config: EngineConfig) -> None:
    """Prints a table and, as the last line, one JSON object.

    Raises:
        UsageError: The flags do not fit together.
    """
    _check(arguments)
    earlier = read_baseline(arguments.compare, "latency") if arguments.compare else None
    if earlier is not None:
        now = {
            name: getattr(arguments, name)
            for name in ("batch_size", "input_len", "output_len", "seed")
        }
        check_same_work(arguments.compare, earlier, {**now, "model": Path(config.model).name})
    settings = [
        ("jaxpage", config),
        *((text, config.replace(**changes_of(text))) for text in arguments.versus),
    ]
    directory = resolve_model(config.model, config.revision)
    draw = np.random.default_rng(arguments.seed)
    shape = (
        arguments.num_iters_warmup + arguments.num_iters,
        arguments.batch_size,
        arguments.input_len,
    )
    prompts = draw.integers(0, read_config(directory)["vocab_size"], shape).tolist()
    measured = []
    for name, engine_config in settings:
        with start_engine(engine_config) as (llm, _):
            _check_length(arguments, llm)
            measured.append(_measure(llm, name, arguments, prompts))
    if arguments.baseline:
        items = [
            WorkItem(tuple(prompt), arguments.output_len) for batch in prompts for prompt in batch
        ]
        arguments.baseline_batch_size = arguments.batch_size
        # The baseline warms up by itself, so it gets the measured batches alone.
        beside = baseline(
            arguments, config, directory, items[-arguments.num_iters * arguments.batch_size :]
        )
        measured.append(EngineLatencies(beside.engine, (beside.duration / arguments.num_iters,)))
    print(_table(measured), "\n")
    names = ("batch_size", "input_len", "output_len", "num_iters", "seed")
    result = {
        **measured[0].as_dict(),
        **{name: getattr(arguments, name) for name in names},
        "baselines": [engine_config.as_dict() for engine_config in measured[1:]],
        "config": config.model_dump(),
        "environment": environment(),
    }
    if earlier is not None:
        comparison = compare(arguments.compare, earlier, result)
        result["compared"] = comparison.as_dict()
        print(comparison.describe())
    print_result(result, arguments)


def _check(arguments: argparse.Namespace) -> None:
    for name, minimum in (
        ("batch_size", 1),
        ("input_len", 1),
        ("output_len", 1),
        ("num_iters", 1),
        ("num_iters_warmup", 0),
    ):
        if getattr(arguments, name) < minimum:
            raise UsageError(
                f"--{name.replace('_', '-')} must be at least {minimum}, got "
                f"{getattr(arguments, name)}"
            )
    if arguments.seed < 0:
        raise UsageError(f"--seed must not be negative, got {arguments.seed}")
    check_baseline(arguments)
    check_writable("--output-json", arguments.output_json)


def _check_length(arguments: argparse.Namespace, llm: LLM) -> None:
    if (length := arguments.input_len + arguments.output_len) > llm.max_model_len:
        raise UsageError(
            f"--input-len {arguments.input_len} and --output-len {arguments.output_len} are "
            f"{length} tokens together, "
            f"and max_model_len is {llm.max_model_len}"
        )


def _measure(
    llm: LLM, name: str, arguments: argparse.Namespace, prompts: Sequence[list[list[int]]]
) -> EngineLatencies:
    """Returns the latencies of one engine; the first iterations warm up.

    No iteration finds what another computed: every prompt is new, and the prefix cache is reset.
    """
    seconds = []
    for batch in tqdm(prompts, desc=name, unit="batch", disable=None):
        llm.reset_prefix_cache()
        start = perf_counter()
        outputs = llm.generate(batch, parameters(arguments.output_len), use_tqdm=False)
        seconds.append(perf_counter() - start)
        if any(len(output.outputs[0].token_ids) != arguments.output_len for output in outputs):
            raise RuntimeError(f"{name} gave fewer tokens than were asked for")
    return EngineLatencies(name, tuple(seconds[arguments.num_iters_warmup :]), dtypes(llm))


def _table(measured: Sequence[EngineLatencies]) -> str:
    rows = [
        ["", *(latency.engine for latency in measured)],
        ["mean (s)", *(f"{latency.mean:.4f}" for latency in measured)],
    ]
    results = [latency.as_dict()["percentiles"] for latency in measured]
    for percent in map(str, PERCENTILES):
        rows.append(
            [f"p{percent} (s)", *(f"{r[percent]:.4f}" if percent in r else "-" for r in results)]
        )
    return "\n".join(align(rows, num_words=1))
