"""Adds the flags of settings and sampling parameters, with vLLM's names, to parsers of commands.

Nothing heavy is imported here, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from jaxpage.cli.flag import Flag, json_object
from jaxpage.cli.setting_flags import ENGINE_FLAGS, SERVER_FLAGS

# These settings decide what fits in memory.
PLAN_SETTINGS = (
    *(
        "revision",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "max_model_len",
        "block_size",
        "num_blocks",
        "kv_cache_memory_bytes",
    ),
    *(
        "gpu_memory_utilization",
        "max_num_seqs",
        "max_num_batched_tokens",
        "speculative_config",
        "tensor_parallel_size",
    ),
    *("tensor_parallel_reduction", "enable_lora", "max_loras", "max_lora_rank"),
)
# `jaxpage plan` takes values of these settings that this version cannot run.
PLANNED_SETTINGS = (
    "kv_cache_dtype",
    "tensor_parallel_size",
)
# Settings of the server that change its answers, for `jaxpage run-batch`.
BATCH_SETTINGS = (
    "served_model_name",
    "lora_modules",
    "max_body_bytes",
    "strict_requests",
    "tool_parser",
    "reasoning_parser",
    "rerank_method",
)

SAMPLING_FLAGS = (
    Flag("max_tokens", int, "longest output in tokens; default: 200"),
    Flag("min_tokens", int, "only --max-tokens ends the text before this many tokens; default: 0"),
    Flag(
        "temperature",
        float,
        "0 to 2; 0: greedy; default: generation_config.json, else 1 (chat: 0.7)",
    ),
    Flag(
        "top_p",
        float,
        "keep the most likely tokens whose probabilities sum up to this; default of chat: 0.9",
    ),
    Flag("top_k", int, "keep this many of the most likely tokens; 0: all"),
    Flag("min_p", float, "drop tokens below this share of the highest probability; 0 to 1"),
    Flag("seed", int, "seed of the sampling noise; the same seed gives the same text"),
    Flag("n", int, "samples per prompt (only 1 on the command line)"),
    Flag(
        "presence_penalty",
        float,
        "subtracted once from the logits of tokens in the output; -2 to 2",
    ),
    Flag(
        "frequency_penalty",
        float,
        "subtracted for each time that the token is in the output; -2 to 2",
    ),
    Flag(
        "repetition_penalty",
        float,
        "above 1: tokens of the prompt and output become less likely; 1: off",
    ),
    Flag(
        "structured_outputs",
        json_object,
        'what the output must match: {"regex": ...}, {"json": ...}, {"choice": ...}',
        "JSON",
    ),
    Flag("ignore_eos", None, "continue after end-of-sequence tokens"),
    Flag("include_stop_str_in_output", None, "keep the stop string in the text"),
    Flag("skip_special_tokens", None, "leave special tokens out of the text; default: yes"),
)


def add_engine_flags(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """Adds `--config` and the flags of an engine's settings, except those in `without`."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--config", metavar="FILE", help="YAML file with settings; flags win over it"
    )
    for flag in ENGINE_FLAGS:
        if flag.setting not in without:
            flag.add_to(group)


def add_server_flags(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    """Adds the flags of a server's settings, or of those in `only`."""
    group = parser.add_argument_group("server")
    for flag in SERVER_FLAGS:
        if only is None or flag.setting in only:
            flag.add_to(group)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a request's sampling parameters."""
    group = parser.add_argument_group("sampling")
    for flag in SAMPLING_FLAGS:
        flag.add_to(group)
    add = group.add_argument
    add(
        "--stop",
        action="append",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="stop before this text; repeatable",
    )
    add(
        "--stop-token-ids",
        type=int,
        nargs="+",
        metavar="ID",
        default=argparse.SUPPRESS,
        help="stop after any of these tokens",
    )


def engine_settings(arguments: argparse.Namespace, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the engine's settings that were given on the command line, except `without`."""
    names = {flag.setting for flag in ENGINE_FLAGS} - set(without)
    return {name: value for name, value in vars(arguments).items() if name in names}


def server_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the server's settings that were given on the command line."""
    names = {flag.setting for flag in SERVER_FLAGS}
    return {name: value for name, value in vars(arguments).items() if name in names}


def sampling_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the sampling parameters that were given on the command line."""
    names = {flag.setting for flag in SAMPLING_FLAGS} | {"stop", "stop_token_ids"}
    return {name: value for name, value in vars(arguments).items() if name in names}
