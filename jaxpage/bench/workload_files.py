"""Reads workloads from files.

The formats are ShareGPT and Alpaca as they are published, prompts in JSON lines, and traces of
arrivals in Mooncake's format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxpage.bench.workloads import WorkItem
from jaxpage.errors import UsageError

Encode = Callable[[str], list[int]]
TRACE_BLOCK = 512  # the tokens that one of a trace's `hash_ids` means


def read_workload(
    dataset: str,
    path: str,
    count: int,
    *,
    seed: int,
    vocab_size: int,
    max_input: int,
    max_output: int,
    encode: Encode,
) -> list[WorkItem]:
    """Returns the first `count` requests of a file, cut at the caps.

    They are in the file's order if it has times, and are shuffled by the seed otherwise.

    Args:
        dataset: The format of the file.
        path: The file.
        count: The number of requests.
        seed: The seed of the order, and of random tokens.
        vocab_size: The size of the vocabulary for random tokens.
        max_input: The longest prompt in tokens.
        max_output: The longest output in tokens.
        encode: Turns a text into tokens; raises UsageError if there is no tokenizer.

    Raises:
        UsageError: The file has another format, or too few requests.
    """
    try:
        entries = list(_entries(dataset, path))
        if dataset != "trace":
            np.random.default_rng(seed).shuffle(entries)
        find = {"sharegpt": _sharegpt, "alpaca": _alpaca, "custom": _custom}
        work: list[WorkItem] = []
        for entry in entries:
            items = (
                _from_trace(entry, vocab_size, seed)
                if dataset == "trace"
                else find[dataset](entry, encode, max_output)
            )
            if items and items.prompt_token_ids and items.num_output_tokens > 0:
                prompt = items.prompt_token_ids[:max_input]
                work.append(
                    WorkItem(prompt, min(items.num_output_tokens, max_output), items.seconds)
                )
            if len(work) == count:
                return _from_zero(work)
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--dataset-path {path}: not a file of --dataset {dataset}: {type(error).__name__}: "
            f"{error}"
        ) from None
    raise UsageError(
        f"--dataset-path {path} has {len(work)} requests, fewer than --num-prompts {count}"
    )


def _entries(dataset: str, path: str) -> Iterator[Any]:
    text = Path(path).read_text(encoding="utf-8")
    if dataset in ("sharegpt", "alpaca"):
        yield from json.loads(text)
    else:
        yield from (json.loads(line) for line in text.splitlines() if line.strip())


def _sharegpt(entry: Any, encode: Encode, _: int) -> WorkItem | None:
    """Returns the first message as the prompt; the tokens of its answer are counted."""
    turns = entry.get("conversations") or entry.get("conversation") or []
    if len(turns) < 2:
        return None
    return WorkItem(tuple(encode(turns[0]["value"])), len(encode(turns[1]["value"])))


def _alpaca(entry: Any, encode: Encode, _: int) -> WorkItem:
    prompt = "\n".join(part for part in (entry["instruction"], entry.get("input")) if part)
    return WorkItem(tuple(encode(prompt)), len(encode(entry["output"])))


def _custom(entry: Any, encode: Encode, max_output: int) -> WorkItem:
    """Returns the request of an entry with a `prompt`, which is a text or token ids.

    `output_tokens`, vLLM's name, are as many as possible unless they are given.
    """
    prompt = entry["prompt"]
    token_ids = encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
    return WorkItem(tuple(token_ids), int(entry.get("output_tokens", max_output)))


def _from_trace(entry: Any, vocab_size: int, seed: int) -> WorkItem:
    """Returns a request with the lengths of an entry.

    The same hash id gives the same random tokens, so that prompts share the prefixes that they
    shared.
    """
    length = int(entry["input_length"])
    hash_ids = entry.get("hash_ids") or ()
    tokens: list[int] = []
    for hash_id in hash_ids:
        draw = np.random.default_rng((seed, int(hash_id)))
        tokens += draw.integers(0, vocab_size, TRACE_BLOCK).tolist()
    if len(tokens) < length:
        # The entry is the seed, so that its tokens do not depend on its place in the file.
        draw = np.random.default_rng((seed, *json.dumps(entry, sort_keys=True).encode()))
        tokens += draw.integers(0, vocab_size, length - len(tokens)).tolist()
    # The times of Mooncake's traces are milliseconds.
    return WorkItem(
        tuple(tokens[:length]), int(entry["output_length"]), float(entry["timestamp"]) / 1000
    )


def _from_zero(work: list[WorkItem]) -> list[WorkItem]:
    """Returns the requests in order of time, with the first arrival at 0."""
    if not work or work[0].seconds is None:
        return work
    first = min(item.seconds or 0.0 for item in work)
    moved = [
        WorkItem(item.prompt_token_ids, item.num_output_tokens, (item.seconds or 0.0) - first)
        for item in work
    ]
    return sorted(moved, key=lambda item: item.seconds or 0.0)
