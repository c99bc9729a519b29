"""`jaxpage bench serve`: latencies and throughput of a server as its clients see them, and of static batching beside it."""

from __future__ import annotations

import argparse
import asyncio
import math
import uuid
from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxpage.bench.http_client import Answer, Client
from jaxpage.bench.report import environment, print_result
from jaxpage.bench.throughput import capped, check_workload, check_writable
from jaxpage.bench.workloads import WorkItem, make_workload
from jaxpage.cli.flags import UsageError
from jaxpage.tables import aligned

_PERCENTILES = (50, 90, 99)
_ROWS = (
    ("Successful requests", "completed", "d"),
    ("Failed requests", "failed", "d"),
    ("Benchmark duration (s)", "duration", ".2f"),
    ("Total input tokens", "total_input_tokens", "d"),
    ("Total generated tokens", "total_output_tokens", "d"),
    ("Request throughput (req/s)", "request_throughput", ".2f"),
    ("Output token throughput (tok/s)", "output_throughput", ".1f"),
    ("Total token throughput (tok/s)", "total_token_throughput", ".1f"),
    *(
        (f"{label} {name.upper()} (ms)", f"{key}_{name}_ms", ".2f")
        for name in ("ttft", "tpot", "itl", "e2el")
        for label, key in (("Mean", "mean"), ("Median", "median"), ("P90", "p90"), ("P99", "p99"))
    ),
)


def run(arguments: argparse.Namespace) -> int:
    """Prints a table and, as the last line, one JSON object. Status 1 if a request failed. Raises UsageError."""
    _check(arguments)
    measured = asyncio.run(_measured(arguments))
    rows = [["", *(name for name, _ in measured)]]
    rows += [[label, *(format(result[key], form) for _, result in measured)] for label, key, form in _ROWS]
    print("\n".join(aligned(rows, num_words=1)), "\n")
    (_, first), *others = measured
    names = ("base_url", "dataset", "seed", "num_prompts", "request_rate", "burstiness", "max_concurrency")
    asked = {name: getattr(arguments, name) for name in names}
    asked["request_rate"] = None if math.isinf(arguments.request_rate) else arguments.request_rate
    result = {
        **first,
        **asked,
        "baselines": [{"engine": name, **one} for name, one in others],
        "environment": environment(with_device=False),
    }
    print_result(result, arguments.output_json)
    return int(any(result["failed"] for _, result in measured))


def _check(arguments: argparse.Namespace) -> None:
    check_workload(arguments)
    for name in ("request_rate", "burstiness"):
        if not getattr(arguments, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} must be more than 0, got {getattr(arguments, name)}")
    for name in ("max_concurrency", "baseline_batch_size"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if arguments.baseline not in (None, "static"):
        raise UsageError(f"--baseline must be static, got {arguments.baseline!r}")
    if math.isinf(arguments.request_rate) and arguments.burstiness != 1:
        raise UsageError("--burstiness needs --request-rate: without it all requests come at once")
    check_writable("--output-json", arguments.output_json)


async def _measured(arguments: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    client = Client(arguments.base_url)
    [card, *_] = [
        card for card in (await client.get("/v1/models"))["data"] if arguments.model in (None, card["id"])
    ] or [None]
    if card is None:
        raise UsageError(f"--model {arguments.model}: the server has no such model")
    vocab_size = arguments.vocab_size or (await client.get("/v1/capabilities"))["model"]["vocab_size"]
    max_input, max_output = capped(arguments, card["max_model_len"])
    work = make_workload(
        arguments.dataset,
        arguments.num_prompts,
        seed=arguments.seed,
        vocab_size=vocab_size,
        max_input=max_input,
        max_output=max_output,
    )
    gaps = np.random.default_rng(arguments.seed).gamma(arguments.burstiness, 1 / arguments.burstiness, len(work))
    arrivals = (np.cumsum(gaps) / arguments.request_rate).tolist()
    warm_up = await client.complete(_body(card["id"], work[0]), perf_counter())
    if warm_up.error is not None:
        raise UsageError(f"the first request failed: {warm_up.error}")
    measured = [("continuous", await _run(client, card["id"], work, arrivals, arguments.max_concurrency))]
    if arguments.baseline:
        size = arguments.baseline_batch_size
        measured.append((f"static batches of {size}", await _run(client, card["id"], work, arrivals, size, whole=True)))
    return measured


async def _run(
    client: Client,
    model: str,
    work: Sequence[WorkItem],
    arrivals: Sequence[float],
    most: int | None,
    *,
    whole: bool = False,
) -> dict[str, Any]:
    """Sends every request at its time.

    Args:
        arrivals: seconds from the beginning, rising.
        most: requests at a time.
        whole: a free place is used again only when all are free: the batches of an engine that cannot change them.
    """
    salt = uuid.uuid4().hex  # no run finds the prefixes of another in the server's cache
    places = Places(most or len(work), whole=whole)
    start = perf_counter()
    with tqdm(total=len(work), desc="Static batches" if whole else "Requests", unit="request", disable=None) as bar:

        async def one(item: WorkItem, arrival: float) -> Answer:
            await asyncio.sleep(start + arrival - perf_counter())
            due = perf_counter()
            await places.take()
            try:
                return await client.complete({**_body(model, item), "cache_salt": salt}, due)
            finally:
                places.give_back()
                bar.update()

        answers = await asyncio.gather(*(one(item, arrival) for item, arrival in zip(work, arrivals, strict=True)))
    return summary(answers, perf_counter() - start)


class Places:
    """Places for requests at a time, first come, first served."""

    def __init__(self, number: int, *, whole: bool) -> None:
        self._number, self._whole = number, whole
        self._taken = 0
        self._waiting: list[asyncio.Future[None]] = []

    async def take(self) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        if not self._whole or not self._taken:
            asyncio.get_running_loop().call_soon(self._admit)  # with those that come at the same time
        await place

    def give_back(self) -> None:
        self._taken -= 1
        self._admit()

    def _admit(self) -> None:
        if self._whole and self._taken:
            return
        while self._waiting and self._taken < self._number:
            self._taken += 1
            self._waiting.pop(0).set_result(None)


def _body(model: str, item: WorkItem) -> dict[str, Any]:
    """Greedy, and exactly that many tokens; each of them is an output of the stream, also where it is no text yet."""
    return {
        "model": model,
        "prompt": list(item.prompt_token_ids),
        "max_tokens": item.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def summary(answers: Sequence[Answer], duration: float) -> dict[str, Any]:
    """The numbers under vLLM's names. TTFT, TPOT and ITL as there: to the first output; the rest by the other tokens; between outputs."""
    done = [answer for answer in answers if answer.error is None]
    num_input = sum(answer.num_prompt_tokens for answer in done)
    num_output = sum(answer.num_output_tokens for answer in done)
    several = [answer for answer in done if answer.num_output_tokens > 1]
    seconds = {
        "ttft": [answer.outputs[0] - answer.due for answer in done],
        "tpot": [(answer.outputs[-1] - answer.outputs[0]) / (answer.num_output_tokens - 1) for answer in several],
        "itl": [after - before for answer in done for before, after in pairwise(answer.outputs)],
        "e2el": [answer.outputs[-1] - answer.due for answer in done],
    }
    return {
        "completed": len(done),
        "failed": len(answers) - len(done),
        "errors": sorted({answer.error for answer in answers if answer.error is not None})[:5],
        "duration": duration,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        **{key: value for name, values in seconds.items() for key, value in _spread(name, values)},
    }


def _spread(name: str, seconds: Sequence[float]) -> list[tuple[str, float]]:
    values = np.array(seconds or [0.0]) * 1000
    median, p90, p99 = np.percentile(values, _PERCENTILES).tolist()
    spread = {"mean": float(values.mean()), "median": median, "p90": p90, "p99": p99}
    return [(f"{label}_{name}_ms", value) for label, value in spread.items()]
