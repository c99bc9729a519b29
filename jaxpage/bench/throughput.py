"""Measures the tokens per second of many requests at once, for `jaxpage bench throughput`.

A baseline, other settings, and `jaxpage run-batch` can run after it on the same requests.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxpage.bench.batched import AnswerBatch, run_batched
from jaxpage.bench.comparison import check_same_work, compare, read_baseline
from jaxpage.bench.datasets import check_workload, max_lengths, workload_fields, workload_of
from jaxpage.bench.history import check_record, record
from jaxpage.bench.measure import run_workload
from jaxpage.bench.results import (
    Measurement,
    as_result,
    num_identical,
    print_result,
    table,
    too_short,
)
from jaxpage.bench.workloads import WorkItem
from jaxpage.checkpoints import read_config
from jaxpage.checkpoints.finding import resolve_model
from jaxpage.checkpoints.tokenizers import tokenizer_of
from jaxpage.errors import UsageError
from jaxpage.llm import LLM
from jaxpage.settings.engine_config import NO_LOG, EngineConfig
from jaxpage.settings.yaml_file import parse_scalar

BASELINES = ("transformers",)
PLOT_FORMATS = (".png", ".svg", ".pdf")
_THE_WORK = ("model", "revision", "tokenizer")


def run_throughput(
    arguments: argparse.Namespace, config: EngineConfig, *, answer_batch: AnswerBatch
) -> int:
    """Prints a table and, as the last line, one JSON object.

    Args:
        arguments: The flags.
        config: The settings of the engine.
        answer_batch: Runs a file of requests, for `--run-batch`.

    Returns:
        The status. It is 1 if the whole range of the ratio to the earlier run is below
        `--fail-below`.

    Raises:
        UsageError: The flags do not fit together.
    """
    _check(arguments)
    path = arguments.compare
    earlier = read_baseline(path) if path else None
    if earlier:
        check_same_work(path, earlier, _read_work(arguments, config))
    # Two engines cannot write the same event log.
    unlogged = config.replace(**NO_LOG)
    others = [(text, unlogged.replace(**changes_of(text))) for text in arguments.versus]
    draw = _plotter(arguments.plot) if arguments.plot else None
    directory = resolve_model(config.model, config.revision)
    with start_engine(config) as (llm, load_seconds):
        max_input, max_output = max_lengths(arguments, llm.max_model_len)
        workload = workload_of(
            arguments,
            vocab_size=read_config(directory)["vocab_size"],
            max_input=max_input,
            max_output=max_output,
            tokenizer=tokenizer_of(config) if arguments.dataset_path else None,
        )
        sizes = {"max_input": max_input, "max_output": max_output}
        if earlier:
            num_tokens = sum(len(item.prompt_token_ids) for item in workload)
            check_same_work(path, earlier, {**sizes, "total_input_tokens": num_tokens})
        measure = functools.partial(run_workload, workload=workload, repeats=arguments.repeats)
        measurements = [measure(llm, load_seconds=load_seconds)]
    for text, other in others:
        with start_engine(other) as (llm, load_seconds):
            measurements.append(measure(llm, load_seconds=load_seconds, name=text))
    if arguments.run_batch:
        measurements.append(
            run_batched(answer_batch, unlogged, workload, repeats=arguments.repeats)
        )
    if arguments.baseline:
        measurements.append(baseline(arguments, config, directory, workload))
    result = as_result(
        measurements, **workload_fields(arguments), **sizes, config=config.model_dump()
    )
    comparison = compare(path, earlier, result) if earlier else None
    if comparison:
        result["compared"] = comparison.as_dict()
    _print_report(measurements, len(workload))
    memory = measurements[0].memory
    if draw and memory:
        title = (
            f"What the KV pool held: {config.model}, {arguments.num_prompts} requests "
            f"({arguments.dataset})"
        )
        draw(memory, title=title).savefig(arguments.plot)
    if comparison:
        print(comparison.describe())
    if arguments.record:
        record(arguments.record, result)
    print_result(result, arguments)
    return 1 if comparison and comparison.highest < arguments.fail_below else 0


def _print_report(measurements: Sequence[Measurement], num_requests: int) -> None:
    """Prints the table, and how many outputs of the other engines are the same."""
    print(f"{table(measurements)}\n\n{measurements[0].memory}\n")
    for beside, count in zip(measurements[1:], num_identical(measurements), strict=True):
        print(f"{count} of {num_requests} outputs equal those of {beside.engine}")
    print(too_short(measurements), end="")


def _read_work(arguments: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    model = Path(config.model).name  # because its directory may be another one
    return {
        "dataset": arguments.dataset,
        "seed": arguments.seed,
        "completed": arguments.num_prompts,
        "model": model,
    }


@contextlib.contextmanager
def start_engine(config: EngineConfig) -> Iterator[tuple[LLM, float]]:
    """Yields an engine, and the seconds that it took to start."""
    start = time.perf_counter()
    with LLM(**config.explicit_settings()) as llm:
        yield llm, time.perf_counter() - start


def changes_of(text: str) -> dict[str, Any]:
    """Returns the settings in NAME=VALUE[,NAME=VALUE...]; a value in braces may have commas.

    Raises:
        UsageError: The text is something else.
    """
    changes = {}
    # A comma within braces comes before a } without another { between.
    for part in re.split(r",(?![^{]*\})", text):
        name, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"--versus takes NAME=VALUE[,NAME=VALUE], got {text!r}")
        if name.strip() in _THE_WORK:
            raise UsageError(f"--versus cannot change {name.strip()}: the work would be another")
        changes[name.strip()] = parse_scalar(value)
    return changes


def _check(arguments: argparse.Namespace) -> None:
    check_workload(arguments)
    if arguments.repeats < 1:
        raise UsageError(f"--repeats must be at least 1, got {arguments.repeats}")
    if arguments.fail_below and not arguments.compare:
        raise UsageError("--fail-below goes with --compare: it is a ratio to an earlier run")
    if arguments.baseline_batch_size < 1:
        raise UsageError(
            f"--baseline-batch-size must be at least 1, got {arguments.baseline_batch_size}"
        )
    check_baseline(arguments)
    check_writable("--output-json", arguments.output_json)
    if arguments.record:
        check_record(arguments.record)


def check_baseline(arguments: argparse.Namespace) -> None:
    """Raises UsageError for a baseline that cannot be run, before anything is measured."""
    if arguments.baseline not in (None, *BASELINES):
        raise UsageError(
            f"--baseline must be one of {', '.join(BASELINES)}, got {arguments.baseline!r}"
        )
    # Only look for torch: the first engine should run without it.
    if arguments.baseline and importlib.util.find_spec("torch") is None:
        raise UsageError(
            "--baseline transformers needs torch, which is not installed: pip install torch"
        )


def check_writable(flag: str, path: str | None) -> None:
    """Raises UsageError for a file that could not be written at the end."""
    if path and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise UsageError(f"{flag} {path}: there is no such directory, or it is one")


def check_plot(path: str) -> None:
    """Raises UsageError if matplotlib is not installed, or does not write such a file."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib, which is not installed: pip install 'jaxpage[plot]'"
        )
    if Path(path).suffix not in PLOT_FORMATS:
        raise UsageError(f"--plot writes {', '.join(PLOT_FORMATS)}, got {path!r}")
    check_writable("--plot", path)


def _plotter(path: str) -> Callable[..., Any]:
    """Returns the function that draws the picture."""
    check_plot(path)
    from jaxpage.bench.memory_plot import draw  # matplotlib is optional: see check_plot

    return draw


def baseline(
    arguments: argparse.Namespace, config: EngineConfig, directory: Path, workload: list[WorkItem]
) -> Measurement:
    """Returns the measurement of the same work by static batches of transformers."""
    # torch is optional: see check_baseline.
    from jaxpage.bench.baseline_transformers import run_baseline

    return run_baseline(
        directory, workload, batch_size=arguments.baseline_batch_size, dtype=config.dtype
    )
