"""Measures latencies and throughput of a server as its clients see them, for `jaxpage bench serve`.

Static batching can be measured on the same server.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from jaxpage.bench.datasets import check_workload, max_lengths, workload_fields, workload_of
from jaxpage.bench.results import environment, print_result
from jaxpage.bench.serving.answer_latencies import goals_of, rate_held, summary
from jaxpage.bench.serving.http_client import Client
from jaxpage.bench.serving.load import Endpoint, Load
from jaxpage.bench.serving.serve_comparison import (
    COMPARED,
    check_same_work,
    compare,
    describe,
    read_baseline,
)
from jaxpage.bench.serving.serve_report import rate_notes, table
from jaxpage.bench.serving.server_metrics import MetricsPoller
from jaxpage.bench.throughput import check_plot, check_writable
from jaxpage.bench.workloads import WorkItem
from jaxpage.checkpoints.finding import resolve_tokenizer
from jaxpage.checkpoints.tokenizers import load_tokenizer
from jaxpage.errors import UsageError

_EXTENSIONS = {
    "ignore_eos": True,
    "return_token_ids": True,
}  # fields of jaxpage and vLLM, with which every token is an output of the stream
_UNKNOWN_LENGTH = 1 << 20  # the longest sequence, if a server does not tell it


def run_serve(arguments: argparse.Namespace) -> int:
    """Prints a table and, as the last line, one JSON object; returns 1 if a request failed.

    Raises:
        UsageError: The flags do not fit together or do not fit the server.
    """
    goals = _check(arguments)
    # A picture that cannot be drawn, or a file that cannot be read, is refused before the long run.
    draw = _plotter(arguments.plot) if arguments.plot else None
    path = arguments.compare
    earlier = read_baseline(path) if path else None
    measured, context = asyncio.run(_measure(arguments, goals, earlier))
    print(table(measured), "\n")
    results = [result for _, result in measured if "request_rate" in result]
    print("".join(f"{note}\n" for result in results for note in rate_notes(result)), end="")
    baselines = [
        {"engine": name, **result} for name, result in measured if "request_rate" not in result
    ]
    result = {
        **results[0],
        **context,
        "baselines": baselines,
        "environment": environment(with_device=False),
    }
    if len(results) > 1:
        result["sweep"] = results
    if earlier:
        result["compared"] = compare(earlier, result)
        print(describe(path, result["compared"]), "\n")
    if draw:
        title = f"{context['model_id']}, {arguments.num_prompts} requests ({arguments.dataset})"
        draw(results, title=title).savefig(arguments.plot)
    print_result(result, arguments)
    return int(any(result["failed"] for _, result in measured))


def _check(arguments: argparse.Namespace) -> dict[str, float]:
    """Checks the flags, and returns the goals of the goodput."""
    check_workload(arguments)
    if arguments.dataset == "trace" and arguments.request_rate:
        raise UsageError(
            "--request-rate does not go with --dataset trace, which has times of its own"
        )
    rates = arguments.request_rate = arguments.request_rate or [math.inf]
    for name, values in (("request_rate", rates), ("burstiness", [arguments.burstiness])):
        for value in values:
            if not value > 0:
                raise UsageError(f"--{name.replace('_', '-')} must be more than 0, got {value}")
    for name in ("max_concurrency", "baseline_batch_size", "repeats"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if arguments.baseline not in (None, "static"):
        raise UsageError(f"--baseline must be static, got {arguments.baseline!r}")
    if math.isinf(max(rates)) and arguments.burstiness != 1:
        raise UsageError("--burstiness needs --request-rate: without it all requests come at once")
    if len(rates) > 1 and (arguments.baseline or arguments.compare):
        raise UsageError("--baseline and --compare go with one --request-rate")
    if arguments.baseline and arguments.dataset == "chat":
        raise UsageError(
            "--baseline static does not go with --dataset chat, whose rounds wait for each other"
        )
    check_writable("--output-json", arguments.output_json)
    return goals_of(arguments.goodput)


async def _measure(
    arguments: argparse.Namespace, goals: dict[str, float], earlier: dict[str, Any] | None
) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, Any]]:
    """Returns the results by name, and the fields that they have in common.

    The results of a baseline have no rate.
    """
    client = Client(arguments.base_url)
    card = await _card(client, arguments.model)
    capabilities = await _capabilities(client)
    work, sizes = _workload(arguments, card, capabilities)
    rates = arguments.request_rate
    schedule = _arrivals(arguments)
    context = {
        "base_url": arguments.base_url,
        "model_id": card["id"],
        **workload_fields(arguments),
        **sizes,
    }
    context |= {
        name: getattr(arguments, name) for name in ("num_prompts", "burstiness", "max_concurrency")
    }
    context |= {"arrivals": schedule, "goodput": goals or None, "config": capabilities or None}
    if earlier:
        # JSON has no infinity: a result has None for requests that come all at once.
        rate = None if math.isinf(rates[0]) else rates[0]
        check_same_work(arguments.compare, earlier, {**context, "request_rate": rate})
    begin = perf_counter()
    endpoint = await _warm_up(client, card["id"], work[0])
    context["warmup_seconds"] = perf_counter() - begin
    measured = []
    for rate in rates:
        maximum = arguments.max_concurrency
        is_closed = schedule == "closed loop"
        loads = [
            Load(endpoint, work, _times(arguments, work, rate), maximum, is_closed=is_closed)
            for _ in range(arguments.repeats)
        ]
        result = _median([await _run(client, load, work, goals) for load in loads])
        name = "continuous" if len(rates) == 1 else f"{rate:g} req/s"
        measured.append((name, {"request_rate": None if math.isinf(rate) else rate, **result}))
    if arguments.baseline:
        size = arguments.baseline_batch_size
        load = Load(endpoint, work, _times(arguments, work, rates[0]), size, whole=True)
        measured.append((f"static batches of {size}", await _run(client, load, work, goals)))
    return measured, context


async def _run(
    client: Client, load: Load, work: Sequence[WorkItem], goals: dict[str, float]
) -> dict[str, Any]:
    async with MetricsPoller(client) as metrics:
        answers, start = await load.run()
        duration = perf_counter() - start
    arriving = [answer for answer, item in zip(answers, work, strict=True) if item.after is None]
    held = {} if load.is_closed else rate_held(arriving, start)
    return {**summary(answers, duration, goals), **held, **metrics.as_dict()}


def _median(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the run with the median time, with the compared numbers of all runs.

    For an even number of runs it is the slower of the middle ones.
    """
    median = sorted(results, key=lambda result: result["duration"])[len(results) // 2]
    return {**median, "runs": [{name: result[name] for name in COMPARED} for result in results]}


async def _card(client: Client, model: str | None) -> dict[str, Any]:
    cards: list[dict[str, Any]] = (await client.get("/v1/models"))["data"]
    matching = [card for card in cards if model in (None, card["id"])]
    if not matching:
        raise UsageError(f"--model {model}: the server has no such model")
    return matching[0]


async def _capabilities(client: Client) -> dict[str, Any]:
    """Returns what a jaxpage server says of itself, without the table of parameters.

    Other servers say nothing.
    """
    try:
        capabilities = await client.get("/v1/capabilities")
    except UsageError:
        return {}
    return {name: value for name, value in capabilities.items() if name != "parameters"}


def _workload(
    arguments: argparse.Namespace, card: dict[str, Any], capabilities: dict[str, Any]
) -> tuple[list[WorkItem], dict[str, int]]:
    tokenizer = (
        load_tokenizer(resolve_tokenizer(arguments.tokenizer)) if arguments.tokenizer else None
    )
    size = arguments.vocab_size or capabilities.get("model", {}).get("vocab_size")
    # llama.cpp's server has the size in `meta`.
    size = (
        size or (card.get("meta") or {}).get("n_vocab") or (len(tokenizer) if tokenizer else None)
    )
    if not size:
        raise UsageError(
            "the server does not tell the size of its vocabulary: give --vocab-size N or "
            "--tokenizer MODEL"
        )
    max_input, max_output = max_lengths(arguments, card.get("max_model_len") or _UNKNOWN_LENGTH)
    work = workload_of(
        arguments, vocab_size=size, max_input=max_input, max_output=max_output, tokenizer=tokenizer
    )
    return work, {"max_input": max_input, "max_output": max_output}


async def _warm_up(client: Client, model: str, item: WorkItem) -> Endpoint:
    """Sends one request, and returns the endpoint with the fields that the server takes."""
    for endpoint in (Endpoint(client, model, _EXTENSIONS), Endpoint(client, model)):
        warm_up = await client.complete(endpoint.body(item, item.prompt_token_ids), perf_counter())
        if warm_up.error is None:
            return endpoint
    raise UsageError(f"the first request failed: {warm_up.error}")


def _arrivals(arguments: argparse.Namespace) -> str:
    """Returns the name of the process that makes the arrivals."""
    if arguments.dataset == "trace":
        return "trace"
    if math.isinf(arguments.request_rate[0]):
        return "closed loop" if arguments.max_concurrency and not arguments.baseline else "burst"
    return "poisson" if arguments.burstiness == 1 else "gamma"


def _times(arguments: argparse.Namespace, work: Sequence[WorkItem], rate: float) -> list[float]:
    """Returns the seconds from the beginning to each arrival.

    The gaps have a Gamma distribution whose shape is the burstiness, as in vLLM.
    """
    if arguments.dataset == "trace":
        return [item.seconds or 0.0 for item in work]
    shape = arguments.burstiness
    # With the scale 1 / shape the mean gap is 1, whatever the burstiness.
    gaps = np.random.default_rng(arguments.seed).gamma(shape, 1 / shape, len(work))
    # At an infinite rate all requests arrive at 0.
    times: list[float] = (np.cumsum(gaps) / rate).tolist()
    return times


def _plotter(path: str) -> Callable[..., Any]:
    check_plot(path)
    from jaxpage.bench.serving.serve_plot import draw  # matplotlib is optional: see check_plot

    return draw
