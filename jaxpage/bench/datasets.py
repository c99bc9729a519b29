"""Makes the workload that the flags of `bench throughput` and `bench serve` ask for.

It also checks these flags.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxpage.bench.workload_files import read_workload
from jaxpage.bench.workloads import DATASETS, WorkItem, chat, make_workload, prefix_repetition
from jaxpage.errors import UsageError

KINDS = (*DATASETS, "prefix_repetition", "chat", "trace", "custom")
_FILES = ("sharegpt", "alpaca", "trace", "custom")  # those that can be read from a file
_OF_KIND = {
    "num_prefixes": ("prefix_repetition", 4),
    "prefix_len": ("prefix_repetition", 64),
    "num_rounds": ("chat", 4),
}


def check_workload(arguments: argparse.Namespace) -> None:
    """Raises UsageError for a workload that is impossible, or for a flag that would be ignored."""
    kind = arguments.dataset
    path = arguments.dataset_path
    for name in ("num_prompts", "max_input", "max_output", *_OF_KIND):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UsageError(f"{_flag(name)} must be at least 1, got {value}")
    if kind not in KINDS:
        raise UsageError(f"--dataset must be one of {', '.join(KINDS)}, got {kind!r}")
    for name, (dataset, default) in _OF_KIND.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
        elif kind != dataset:
            raise UsageError(f"{_flag(name)} goes with --dataset {dataset}, not {kind}")
    if path and kind not in _FILES:
        raise UsageError(f"--dataset-path goes with --dataset {', '.join(_FILES)}, not {kind}")
    if kind in ("trace", "custom") and not path:
        raise UsageError(f"--dataset {kind} needs --dataset-path FILE")
    if arguments.seed < 0:
        raise UsageError(f"--seed must not be negative, got {arguments.seed}")


def workload_of(
    arguments: argparse.Namespace,
    *,
    vocab_size: int,
    max_input: int,
    max_output: int,
    tokenizer: Any | None,
) -> list[WorkItem]:
    """Returns the requests that the flags ask for.

    Raises:
        UsageError: The file cannot be read, it needs a tokenizer and there is none, or the prompts
            leave no room.
    """
    kind = arguments.dataset
    count = arguments.num_prompts
    sizes = {
        "seed": arguments.seed,
        "vocab_size": vocab_size,
        "max_input": max_input,
        "max_output": max_output,
    }
    if arguments.dataset_path:

        def encode(text: str) -> list[int]:
            if tokenizer is None:
                raise UsageError(
                    f"--dataset-path {arguments.dataset_path} has texts, and there is no tokenizer "
                    "for them"
                )
            token_ids: list[int] = tokenizer(text)["input_ids"]
            return token_ids

        return read_workload(kind, arguments.dataset_path, count, **sizes, encode=encode)
    if kind == "prefix_repetition":
        if arguments.prefix_len >= max_input:
            raise UsageError(
                f"--prefix-len {arguments.prefix_len} leaves nothing of --max-input {max_input}"
            )
        return prefix_repetition(
            count, **sizes, num_prefixes=arguments.num_prefixes, prefix_len=arguments.prefix_len
        )
    if kind == "chat":
        if max_input < 2 * arguments.num_rounds:
            raise UsageError(
                f"--num-rounds {arguments.num_rounds} needs --max-input {2 * arguments.num_rounds} "
                "or more"
            )
        return chat(count, **sizes, num_rounds=arguments.num_rounds)
    return make_workload(kind, count, **sizes)


def workload_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of a result that describe its workload, without the caps."""
    of_kind = {
        name: getattr(arguments, name)
        for name, (dataset, _) in _OF_KIND.items()
        if dataset == arguments.dataset
    }
    path = {"dataset_path": arguments.dataset_path} if arguments.dataset_path else {}
    return {"dataset": arguments.dataset, **path, **of_kind, "seed": arguments.seed}


def max_lengths(arguments: argparse.Namespace, max_model_len: int) -> tuple[int, int]:
    """Returns the longest prompt and output that fit the model together.

    A line on stderr says so if they are less than asked for.
    """
    max_input = min(arguments.max_input, max_model_len // 2)
    max_output = min(arguments.max_output, max_model_len - max_input)
    if (max_input, max_output) != (arguments.max_input, arguments.max_output):
        print(
            f"max_model_len is {max_model_len}: prompts are cut to {max_input} tokens, outputs to "
            f"{max_output}",
            file=sys.stderr,
        )
    return max_input, max_output


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
