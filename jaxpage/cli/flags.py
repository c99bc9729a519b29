"""The flags of the command line, with vLLM's names. Nothing heavy is imported here, so that `--help` is instant."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpage.settings.byte_sizes import parse_bytes


class OneModel(argparse.Action):
    """The model's name, by position or as a flag, and not twice."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if "model" in namespace:
            raise argparse.ArgumentError(None, f"the model is given twice: {namespace.model!r} and {values!r}")
        namespace.model = values


@dataclass(frozen=True)
class Flag:
    """A flag and the setting it gives. What was not given on the command line does not appear in the parsed result."""

    setting: str
    kind: Callable[[str], Any] | None  # None: a switch with --no- form
    help: str
    metavar: str | None = None
    alias: str | None = None  # another name, where vLLM has one
    several: bool = False  # takes one or more values, and may be repeated
    action: type[argparse.Action] | None = None  # what argparse does with it, where it is nothing usual

    @property
    def option(self) -> str:
        return "--" + self.setting.replace("_", "-")

    def add_to(self, parser: argparse._ArgumentGroup) -> None:
        options = (self.option, self.alias) if self.alias else (self.option,)
        rest: dict[str, Any] = {"dest": self.setting, "default": argparse.SUPPRESS, "help": self.help}
        if self.kind is None:
            parser.add_argument(*options, action=argparse.BooleanOptionalAction, **rest)
        else:
            metavar = self.metavar or {int: "N", float: "X"}.get(self.kind, "NAME")  # type: ignore[call-overload]
            if self.several:
                rest |= {"nargs": "+", "action": "extend"}
            if self.action:
                rest["action"] = self.action
            parser.add_argument(*options, type=self.kind, metavar=metavar, **rest)


def json_object(text: str) -> dict[str, Any]:
    """The value of a flag that takes a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text[:80]!r}")
    return value


def byte_size(text: str) -> int:
    """The value of a flag that takes an amount of memory."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds_or_none(text: str) -> float | None:
    """The value of a flag that takes a number of seconds, or "none" for no limit."""
    return None if text == "none" else float(text)


# One per field of EngineConfig; a test compares the two.
ENGINE_FLAGS = (
    Flag("model", str, '"demo" (packaged), a directory, a GGUF file, or a hub id; default: demo', action=OneModel),
    Flag("tokenizer", str, "directory of the tokenizer's files, or a GGUF file; default: the model's"),
    Flag("revision", str, "branch, tag or commit of the hub repository"),
    Flag("load_format", str, "auto, safetensors, orbax or gguf; default: auto"),
    Flag(
        "dtype",
        str,
        "auto, float32, bfloat16 or float16; default: auto (the checkpoint's; on CPU bfloat16 only if it is faster)",
    ),
    Flag(
        "quantization",
        str,
        "weights of few bits: int8 or int4, rounded at load; gguf, as a GGUF file has them; or the name of the checkpoint's own method; "
        "default: as the checkpoint; of a GGUF file, dequantised",
    ),
    Flag(
        "kv_cache_dtype",
        str,
        "type of the KV cache: auto (as --dtype, or as a quantised checkpoint says), int8 or fp8; default: auto",
    ),
    Flag("max_model_len", int, "longest sequence in tokens, prompt and output together; default: the model's"),
    Flag("block_size", int, "tokens of a KV block, a power of two from 1 to 128; default: 16"),
    Flag(
        "num_blocks",
        int,
        "KV blocks of the pool; default: what fits; on CPU 512 tokens for each of --max-num-seqs, at most 4 GiB",
    ),
    Flag("kv_cache_memory_bytes", byte_size, "size of the KV pool, instead of --num-blocks: 4GiB, or bytes", "SIZE"),
    Flag("gpu_memory_utilization", float, "share of the GPU's memory to use, above 0, to 1; default: 0.9"),
    Flag(
        "swap_space_blocks",
        int,
        "KV blocks in host memory for swapping, else in a file of prefix_cache_directory; default: as many as the KV pool has",
    ),
    Flag("max_num_seqs", int, "most sequences in a step; default: 64 (1 for generate and chat)"),
    Flag("max_num_batched_tokens", int, "most query tokens in a step; default: by device"),
    Flag("num_scheduler_steps", int, "tokens that a decode step draws of each sequence, 1 to 32; default: 1"),
    Flag(
        "enable_mixed_steps", None, "decodes and prompt chunks in the same step; default: what the kernel set prefers"
    ),
    Flag("scheduling_policy", str, "order of admission and preemption: fcfs, priority or fair; default: fcfs"),
    Flag("preemption_mode", str, "auto, recompute or swap; default: auto (one sequence: recompute; several: swap)"),
    Flag("new_requests_wait_until", str, "until preempted requests are readmitted or completed; default: readmitted"),
    Flag("enable_prefix_caching", None, "requests share the KV blocks of equal prefixes; default: yes"),
    Flag("attention_backend", str, "auto, or the name of a kernel set (docs/internals/kernels.md); default: auto"),
    Flag("seed", int, "from which the seeds of requests without a seed are drawn; default: 0"),
    Flag(
        "speculative_config",
        json_object,
        'speculative decoding, as JSON, such as {"method": "ngram"} (docs/guides/speculation.md); default: off',
        "JSON",
    ),
    Flag("enable_lora", None, "requests may name a LoRA adapter (docs/guides/lora.md); default: no"),
    Flag("max_loras", int, "most LoRA adapters at once on the device; default: 4"),
    Flag("max_lora_rank", int, "largest rank of a LoRA adapter; default: 16"),
    Flag("tensor_parallel_size", int, "devices that share the model (docs/scale.md); default: 1"),
    Flag("tensor_parallel_reduction", str, "invariant: the same bits on 1, 2 and 4 devices; fast; or auto (default)"),
    Flag(
        "cudagraph_update_mode",
        str,
        "on GPUs, when XLA records a step's CUDA graph anew: always_update, skip_profiled or another of its modes; default: auto",
    ),
    Flag(
        "cudagraph_collectives", None, "on several GPUs, what they exchange is part of a step's CUDA graph; default: no"
    ),
    Flag("prefix_cache_directory", str, "directory in which full KV blocks are kept for later starts"),
    Flag("prefix_cache_disk_bytes", byte_size, "size of the files there; default: 8GiB", "SIZE"),
    Flag("event_log", str, "new file for all events that a replay needs, prompts included"),
)

# One per field of ServerConfig; a test compares the two.
SERVER_FLAGS = (
    Flag("host", str, "address to listen on; default: 127.0.0.1 (only this machine)"),
    Flag("port", int, "TCP port; 0: a free one; default: 8000"),
    Flag(
        "served_model_name",
        str,
        "names of the model in requests; default: MODEL, of a path its last part",
        several=True,
    ),
    Flag("lora_modules", str, "LoRA adapters that requests may name as model", "NAME=PATH", several=True),
    Flag(
        "lora_directory",
        str,
        "LoRA adapters below it may be loaded by POST /v1/load_lora_adapter; default: none",
        "DIRECTORY",
    ),
    Flag(
        "weights_directory",
        str,
        "weights below it may replace the model's by POST /v1/update_weights; default: none",
        "DIRECTORY",
    ),
    Flag("api_key_file", str, "file with API keys, one per line; also $JAXPAGE_API_KEY, separated by commas", "FILE"),
    Flag(
        "max_queued_requests", int, "most requests that wait, in addition to running ones; more get 429; default: 256"
    ),
    Flag(
        "request_timeout_seconds",
        seconds_or_none,
        "most seconds from arrival to the last token, or none; default: 600",
        "X",
    ),
    Flag("shutdown_timeout_seconds", float, "seconds for running requests to finish after SIGTERM; default: 30"),
    Flag("max_body_bytes", byte_size, "largest request body; default: 4MiB", "SIZE"),
    Flag("body_timeout_seconds", float, "seconds for a request's body to arrive; default: 30"),
    Flag("slow_reader_seconds", float, "seconds that a client may leave a stream unread; default: 30"),
    Flag("max_connections", int, "most open connections; default: 1024"),
    Flag("strict_requests", None, "an unknown field is an error, instead of named in a header"),
    Flag("tool_parser", str, "format of the model's tool calls: hermes or llama3_json", alias="--tool-call-parser"),
    Flag("reasoning_parser", str, "format of the model's reasoning: think"),
    Flag("ui", None, "web page at /ui/: playground and inspector"),
    Flag("ui_show_prompts", None, "the inspector shows the prompts and outputs of all users"),
    Flag("log_requests", None, "log every request with its text", alias="--enable-log-requests"),
    Flag("log_json", None, "one JSON object per line of the log"),
    Flag("log_level", str, "debug, info, warning or error; default: info"),
    Flag("kv_events", str, "publish which prefixes are cached, as vLLM does: tcp://127.0.0.1:PORT", "ENDPOINT"),
    Flag(
        "kv_events_replay",
        str,
        "where subscribers ask for KV events that they missed: tcp://127.0.0.1:PORT",
        "ENDPOINT",
    ),
    Flag("kv_events_topic", str, "topic of the KV events; default: none", "TOPIC"),
    Flag("incident_steps", int, "keep the records of the last N steps for POST /debug/incident and failed steps", "N"),
    Flag("incident_directory", str, "where incidents are written; default: the working directory", "DIRECTORY"),
    Flag("incident_token_ids", None, "incidents hold prompts and outputs as token ids, and can be run again"),
    Flag("num_hosts", int, "hosts that share the model, each with a process of its own; default: 1", "N"),
    Flag("host_rank", int, "rank of this host, from 0, which is the server; the others follow it; default: 0", "R"),
    Flag(
        "coordinator",
        str,
        "address of rank 0 between the hosts; PORT + 1 is used too; auto: of the job (Slurm, Kubernetes)",
        "HOST:PORT",
    ),
    Flag("hosts_secret_file", str, "file with the hosts' common secret; else $JAXPAGE_HOSTS_SECRET", "FILE"),
    Flag("host_timeout_seconds", float, "seconds that a host may be silent or in a step; default: 60"),
    Flag(
        "profile_directory",
        str,
        "for debugging: directory for JAX traces of POST /start_profile and /stop_profile",
        "DIRECTORY",
    ),
)

# Settings that decide what fits in memory.
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
    *("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "speculative_config", "tensor_parallel_size"),
    *("tensor_parallel_reduction", "enable_lora", "max_loras", "max_lora_rank"),
)
PLANNED_SETTINGS = (
    "kv_cache_dtype",
    "tensor_parallel_size",
)  # of them, those that are planned before they are honoured

SAMPLING_FLAGS = (
    Flag("max_tokens", int, "longest output in tokens; default: 200"),
    Flag("min_tokens", int, "only --max-tokens ends the text before this many tokens; default: 0"),
    Flag("temperature", float, "0 to 2; 0: greedy; default: generation_config.json, else 1 (chat: 0.7)"),
    Flag("top_p", float, "keep the most likely tokens whose probabilities sum up to this; default of chat: 0.9"),
    Flag("top_k", int, "keep this many of the most likely tokens; 0: all"),
    Flag("min_p", float, "drop tokens below this share of the highest probability; 0 to 1"),
    Flag("seed", int, "seed of the sampling noise; the same seed gives the same text"),
    Flag("n", int, "samples per prompt (only 1 on the command line)"),
    Flag("presence_penalty", float, "subtracted once from the logits of tokens in the output; -2 to 2"),
    Flag("frequency_penalty", float, "subtracted for each time that the token is in the output; -2 to 2"),
    Flag("repetition_penalty", float, "above 1: tokens of the prompt and output become less likely; 1: off"),
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
    """`--config` and the settings of an engine, except those in `without`."""
    group = parser.add_argument_group("engine")
    group.add_argument("--config", metavar="FILE", help="YAML file with settings; flags win over it")
    for flag in ENGINE_FLAGS:
        if flag.setting not in without:
            flag.add_to(group)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """The settings of a server."""
    group = parser.add_argument_group("server")
    for flag in SERVER_FLAGS:
        flag.add_to(group)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """The parameters of a request."""
    group = parser.add_argument_group("sampling")
    for flag in SAMPLING_FLAGS:
        flag.add_to(group)
    add = group.add_argument
    add("--stop", action="append", metavar="TEXT", default=argparse.SUPPRESS, help="stop before this text; repeatable")
    add(
        "--stop-token-ids",
        type=int,
        nargs="+",
        metavar="ID",
        default=argparse.SUPPRESS,
        help="stop after any of these tokens",
    )


def engine_settings(arguments: argparse.Namespace, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The engine settings that were given on the command line."""
    names = {flag.setting for flag in ENGINE_FLAGS} - set(without)
    return {name: value for name, value in vars(arguments).items() if name in names}


def server_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The server's settings that were given on the command line."""
    names = {flag.setting for flag in SERVER_FLAGS}
    return {name: value for name, value in vars(arguments).items() if name in names}


def sampling_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given on the command line."""
    names = {flag.setting for flag in SAMPLING_FLAGS} | {"stop", "stop_token_ids"}
    return {name: value for name, value in vars(arguments).items() if name in names}
