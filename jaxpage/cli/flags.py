"""Adds the flags of settings and sampling parameters, with vLLM's names, to parsers of commands.

Nothing heavy is imported here, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from jaxpage.cli.flag import Flag, json_object
from jaxpage.cli.setting_flags import ENGINE_FLAGS, SERVER_FLAGS
from jaxpage.settings.field_table import (
    PARAMETERS,
    Bool,
    Field,
    Float,
    Int,
    Texts,
    TokenIdList,
)

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
    *("enable_prompt_embeds", "enable_return_routed_experts"),
    *("enable_return_hidden_states", "enable_return_sampling_mask"),
    *("limit_images", "encoder_cache_bytes"),
    *("attention_backend", "batch_invariant", "enable_mixed_steps", "num_scheduler_steps"),
)
# `jaxpage plan` takes values of these settings that this version cannot run.
PLANNED_SETTINGS = (
    "kv_cache_dtype",
    "tensor_parallel_size",
)
# `jaxpage verify` takes these settings from the receipt.
RECEIPT_SETTINGS = (
    *("attention_backend", "dtype", "kv_cache_dtype", "quantization", "seed"),
    *("batch_invariant", "tensor_parallel_reduction"),
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


def _flag_of(field: Field) -> Flag:
    """Returns the flag of a sampling parameter."""
    match field.kind:
        case Int():
            return Flag(field.name, int, field.flag)
        case Float():
            return Flag(field.name, float, field.flag)
        case Bool():
            return Flag(field.name, None, field.flag)
        case Texts():
            return Flag(field.name, str, field.flag, "TEXT", action="append")
        case TokenIdList():
            return Flag(field.name, int, field.flag, "ID", several=True, action="store")
    return Flag(field.name, json_object, field.flag, None if field.kind else "JSON")


SAMPLING_FLAGS = tuple(_flag_of(field) for field in PARAMETERS if field.flag)


def add_engine_flags(parser: argparse.ArgumentParser, excluded: tuple[str, ...] = ()) -> None:
    """Adds `--config` and the flags of an engine's settings, except those in `excluded`."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--config", metavar="FILE", help="YAML file with settings; flags win over it"
    )
    for flag in ENGINE_FLAGS:
        if flag.setting not in excluded:
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


def engine_settings(
    arguments: argparse.Namespace, excluded: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns the engine's settings that were given on the command line, except `excluded`."""
    names = {flag.setting for flag in ENGINE_FLAGS} - set(excluded)
    return {name: value for name, value in vars(arguments).items() if name in names}


def server_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the server's settings that were given on the command line."""
    names = {flag.setting for flag in SERVER_FLAGS}
    return {name: value for name, value in vars(arguments).items() if name in names}


def sampling_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the sampling parameters that were given on the command line."""
    names = {flag.setting for flag in SAMPLING_FLAGS}
    return {name: value for name, value in vars(arguments).items() if name in names}
