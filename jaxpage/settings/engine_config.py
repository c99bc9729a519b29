"""Declares `EngineConfig`: every setting of an engine, checked together before anything is loaded.

The module `sources` reads the values and says where each comes from.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from jaxpage.settings.argument_checks import show
from jaxpage.settings.checked_settings import ByteSize, Problem, Settings, nearest_name, setting
from jaxpage.settings.cuda_graphs import GraphSettings
from jaxpage.settings.draft_settings import AcceptanceRule
from jaxpage.settings.from_vllm import answer_for_keyword
from jaxpage.settings.speculative_config import SpeculativeConfig

_MAX_BLOCK_SIZE = 128
# Sizes and ids are int32 on the device.
_Count = Annotated[int, Field(ge=1, lt=2**31)]
_Name = Annotated[
    str,
    Field(min_length=1),
    BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value),
]


def _power_of_two(size: int) -> int:
    if size > _MAX_BLOCK_SIZE or size.bit_count() != 1:
        raise ValueError(f"must be a power of two from 1 to {_MAX_BLOCK_SIZE}")
    return size


_DTYPE_NAMES = {"half": "float16", "float": "float32"}  # torch's and vLLM's names


def dtype_name(value: Any) -> Any:
    """Returns the name of a dtype that is given as a type or by another name.

    Examples are `jnp.bfloat16`, `np.float32` and "half".
    """
    if isinstance(value, str):
        return _DTYPE_NAMES.get(value, value)
    dtype = getattr(value, "dtype", value)  # jnp.bfloat16 is no type, but has a dtype
    return getattr(dtype, "name", value.__name__ if isinstance(value, type) else value)


def _kv_cache_dtype(value: Any) -> Any:
    """Returns the name of a type of the KV cache that is given by vLLM's name."""
    if value == "fp8_e5m2":
        raise ValueError("must be 'fp8', which is fp8_e4m3: there is no fp8_e5m2")
    return "fp8" if value == "fp8_e4m3" else value


# The settings of an engine that logs no events.
NO_LOG: dict[str, Any] = {"event_log": None, "event_log_weights": False}


# One flat record of more than 20 fields, because each is also a flag, a keyword of `LLM`, a key of
# YAML and a variable, and users know it by that name alone.
class EngineConfig(Settings):
    """Holds the settings of an engine.

    `LLM(...)`, a YAML file, flags and `JAXPAGE_*` variables use the same names. A setting is
    declared here and nowhere else: see `setting`.

    Raises:
        ConfigError: Settings are wrong; the message lists all of them.
        UnsupportedError: This version cannot honour some settings.
    """

    nested: ClassVar[Mapping[str, type[BaseModel]]] = {"speculative_config": SpeculativeConfig}
    plain_text: ClassVar[frozenset[str]] = frozenset(
        {"model", "tokenizer", "revision", "event_log", "prefix_cache_directory"}
    )

    model: _Name = setting("demo", '"demo" (packaged), a directory, a GGUF file, or a hub id')
    tokenizer: _Name | None = setting(
        None,
        "directory of the tokenizer's files, or a GGUF file",
        shown="the model's",
        type_text="AnyPath | None",
    )
    revision: str | None = setting(None, "branch, tag or commit of the hub repository")
    load_format: Literal["auto", "safetensors", "orbax", "gguf"] = setting(
        "auto",
        "format of the weights: auto (what is there), safetensors, orbax or gguf",
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(dtype_name)
    ] = setting(
        "auto",
        "auto, float32, bfloat16 or float16",
        shown="auto (the checkpoint's; on CPU bfloat16 only if it is faster)",
        type_text='Literal["auto", "float32", "bfloat16", "float16", "half", "float"] | DTypeLike',
    )
    quantization: (
        Literal[
            "int8",
            "int4",
            "int8+head",
            "int4+head",
            "gguf",
            "compressed-tensors",
            "fp8",
            "awq",
            "gptq",
            "mxfp4",
            "modelopt",
            "bitsandbytes",
        ]
        | None
    ) = setting(
        None,
        "weights of few bits: int8 or int4, rounded at load, int8+head or int4+head with the "
        "head; gguf, as a GGUF file has them; or the name of the checkpoint's own method",
        shown="as the checkpoint; for a GGUF file, dequantised",
    )
    kv_cache_dtype: Annotated[Literal["auto", "int8", "fp8"], BeforeValidator(_kv_cache_dtype)] = (
        setting(
            "auto",
            "type of the KV cache: auto (as --dtype, or as a quantised checkpoint says), int8 or "
            "fp8",
        )
    )
    max_model_len: Annotated[int, Field(ge=2, lt=2**31)] | None = setting(
        None,
        "longest sequence in tokens, prompt and output together",
        shown="the model's",
    )
    block_size: Annotated[_Count, AfterValidator(_power_of_two)] | Literal["auto"] = setting(
        "auto",
        "tokens of a KV block, a power of two from 1 to 128; auto is 16 until another number was "
        "measured on the card",
    )
    num_blocks: Annotated[int, Field(ge=2, lt=2**31)] | None = setting(
        None,
        "KV blocks of the pool, with the null block",
        shown="what fits; on CPU 512 tokens for each of --max-num-seqs, at most 4 GiB",
    )
    kv_cache_memory_bytes: ByteSize | None = setting(
        None,
        "size of the KV pool, instead of --num-blocks: 4GiB, or bytes",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = setting(
        0.9,
        "share of the GPU's memory to use, above 0, to 1",
    )
    swap_space_blocks: Annotated[int, Field(ge=0, lt=2**31)] | None = setting(
        None,
        "KV blocks in host memory for swapping, else in a file of prefix_cache_directory",
        shown="as many as the KV pool has, if they fit",
    )
    max_num_seqs: _Count = setting(
        64,
        "most sequences in a step; each sample and beam counts",
        shown="64 (1 for generate and chat)",
    )
    max_num_batched_tokens: _Count | None = setting(
        None, "most query tokens in a step", shown="by device"
    )
    num_scheduler_steps: Annotated[int, Field(ge=1, le=32)] | Literal["auto"] = setting(
        "auto",
        "tokens that a decode step draws of each sequence before the host sees them, 1 to 32: less "
        "host time per token, and tokens that arrive together; auto is 1 on CPUs and with "
        "--speculative-config, else up to 8 while no request waits or has just come; numbers "
        "above 1 do not go with --speculative-config",
    )
    enable_mixed_steps: bool | None = setting(
        None,
        "decodes and prompt chunks in the same step, or in alternating steps",
        shown="what the kernel set prefers",
    )
    scheduling_policy: Literal["fcfs", "priority", "fair"] = setting(
        "fcfs",
        "order of admission and preemption: fcfs, priority or fair",
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = setting(
        "auto",
        "what preempted requests do: auto, recompute or swap",
        shown="auto (one sequence: recompute; several: swap)",
    )
    new_requests_wait_until: Literal["readmitted", "completed"] = setting(
        "readmitted",
        "new requests wait until preempted ones are readmitted or completed; higher priorities do "
        "not wait",
    )
    enable_prefix_caching: bool = setting(True, "requests share the KV blocks of equal prefixes")
    prefix_cache_directory: _Name | None = setting(
        None,
        "directory of the user's own in which full KV blocks are kept as files, for later starts "
        "with the same "
        "weights and layout",
        type_text="AnyPath | None",
    )
    prefix_cache_disk_bytes: ByteSize = setting(
        8 * 2**30,
        "size of the files there; the least recently used go first",
        shown="8GiB",
    )
    attention_backend: str = setting(
        "auto",
        "auto (the first that supports the model and the device), or the name of a kernel set "
        "(docs/internals/kernels.md)",
    )
    batch_invariant: bool = setting(
        False,
        "on a GPU, a token has the same bits whatever else is in the batch, and in decode, "
        "verification and chunks: kernels add up in fixed orders; on a CPU it always has",
    )
    seed: Annotated[int, Field(ge=0, lt=2**64)] = setting(
        0,
        "from which the seeds of requests without a seed are drawn",
    )
    speculative_config: SpeculativeConfig | None = setting(
        None,
        'speculative decoding, as JSON, such as {"method": "ngram"} (docs/guides/speculation.md)',
        shown="off",
        type_text='Mapping[str, Any] | SpeculativeConfig | Literal["auto"] | None',
    )
    enable_lora: bool = setting(False, "requests may name a LoRA adapter (docs/guides/lora.md)")
    max_loras: Annotated[int, Field(ge=1, le=256)] = setting(
        4, "most LoRA adapters at once on the device"
    )
    max_lora_rank: Annotated[int, Field(ge=1, le=512)] = setting(
        16,
        "largest rank of a LoRA adapter; the others are padded to it",
    )
    enable_prompt_embeds: bool = setting(
        False,
        "prompts may be vectors in place of tokens, as {'prompt_embeds': array}",
    )
    enable_return_hidden_states: bool = setting(
        False,
        "requests may ask for the last hidden state of each token, with return_hidden_states "
        "(docs/guides/decoding.md)",
    )
    enable_return_routed_experts: bool = setting(
        False,
        "requests may ask for the experts of each token, with return_routed_experts "
        "(docs/guides/decoding.md)",
    )
    enable_return_sampling_mask: bool = setting(
        False,
        "requests may ask for the tokens that each token was drawn from, with "
        "return_sampling_mask (docs/guides/decoding.md)",
    )
    max_aborted_requests: Annotated[int, Field(ge=0, lt=2**31)] = setting(
        256,
        "most aborted requests that are kept, so that they can be continued "
        "(docs/guides/reinforcement-learning.md)",
    )
    limit_images: Annotated[int, Field(ge=0, lt=2**31)] | None = setting(
        None,
        "most pictures of a prompt; 0 leaves the encoder of pictures out, so that the model takes "
        "text alone",
        shown="what a prompt holds",
    )
    encoder_cache_bytes: ByteSize = setting(
        512 * 2**20,
        "host memory for encoded pictures that later requests may have, too: 512MiB, or bytes",
        shown="512MiB",
    )
    tensor_parallel_size: _Count = setting(
        1, "devices that share the model (docs/scale.md)", alias="-tp"
    )
    tensor_parallel_reduction: Literal["auto", "invariant", "fast"] = setting(
        "auto",
        "how what the devices compute is added up: invariant (the same bits on 1, 2 and 4 "
        "devices), fast (whatever "
        "is fastest there), or auto (invariant on 2 or 4 CPU devices, and with batch_invariant; "
        "else fast)",
    )
    cudagraph_update_mode: Literal[
        "auto", "always_update", "skip_profiled", "never_update", "capture_cmd_never_update"
    ] = setting(
        "auto",
        "on GPUs, when XLA records a step's CUDA graph anew: auto (as it does by default), "
        "always_update, "
        "skip_profiled or another of the modes that this version of JAX knows",
    )
    cudagraph_collectives: bool = setting(
        False,
        "on several GPUs, what they exchange is part of a step's CUDA graph",
    )
    event_log: _Name | None = setting(
        None,
        "new file for all events that a replay needs, prompts included",
        type_text="AnyPath | None",
    )
    event_log_weights: bool = setting(
        False,
        "the weights of updates are kept next to the event log, each set once; without them a "
        "replay needs their checkpoints",
    )

    @classmethod
    def unknown(cls, name: str) -> Problem:
        """Returns the problem with a name that no setting has; vLLM's names have an answer."""
        if (answer := answer_for_keyword("settings", name)) is not None:
            return name, f"unknown setting; {answer.text}"
        return super().unknown(name)

    @property
    def acceptance(self) -> AcceptanceRule:
        """Returns the acceptance rule of speculative decoding."""
        return self.speculative_config.rule if self.speculative_config else AcceptanceRule()

    @property
    def graphs(self) -> GraphSettings:
        """Returns the settings of the CUDA graphs."""
        return GraphSettings(self.cudagraph_update_mode, self.cudagraph_collectives)

    def contradictions(self) -> Iterable[Problem]:
        """Yields the problems of settings that contradict each other."""
        return _contradictions(self)

    def find_refused(self) -> Iterable[Problem]:
        """Yields the settings that this version cannot honour."""
        return _not_honoured(self)


def _contradictions(config: EngineConfig) -> Iterable[Problem]:
    if config.num_blocks is not None and config.kv_cache_memory_bytes is not None:
        yield (
            "num_blocks",
            f"cannot be {config.num_blocks} while kv_cache_memory_bytes is "
            f"{config.kv_cache_memory_bytes}: both size the pool",
        )
    if config.preemption_mode == "swap" and config.swap_space_blocks == 0:
        yield (
            "preemption_mode",
            "cannot be 'swap' while swap_space_blocks is 0: there is nowhere to swap to",
        )
    if config.preemption_mode == "recompute" and config.swap_space_blocks:
        yield (
            "swap_space_blocks",
            f"cannot be {config.swap_space_blocks} while preemption_mode is 'recompute': nothing "
            "is swapped",
        )
    if config.preemption_mode == "auto" and config.max_num_seqs == 1 and config.swap_space_blocks:
        yield (
            "swap_space_blocks",
            f"cannot be {config.swap_space_blocks} while max_num_seqs is 1 and preemption_mode "
            "'auto': one sequence recomputes",
        )
    if config.scheduling_policy == "priority" and config.new_requests_wait_until == "completed":
        yield (
            "new_requests_wait_until",
            "cannot be 'completed' while scheduling_policy is 'priority': requests of higher "
            "priority do not wait",
        )
    if config.speculative_config is not None:
        yield from (("speculative_config", text) for text in config.speculative_config.problems())
        if config.num_scheduler_steps not in ("auto", 1):
            yield (
                "num_scheduler_steps",
                f"cannot be {config.num_scheduler_steps} with a speculative_config: drafts need "
                "the host in every step",
            )
    if config.cudagraph_collectives and config.tensor_parallel_size == 1:
        yield (
            "cudagraph_collectives",
            "cannot be true while tensor_parallel_size is 1: one device exchanges nothing",
        )
    if config.prefix_cache_directory is not None and not config.enable_prefix_caching:
        yield (
            "prefix_cache_directory",
            "cannot be given while enable_prefix_caching is false: nothing is cached",
        )
    if not config.enable_lora:
        for name in ("max_loras", "max_lora_rank"):
            if getattr(config, name) != type(config).model_fields[name].default:
                yield (
                    name,
                    f"cannot be {getattr(config, name)} while enable_lora is false: there are no "
                    "adapters",
                )
    if config.max_num_batched_tokens is not None:
        for name in ("max_num_seqs", "block_size"):
            minimum = getattr(config, name)
            if minimum != "auto" and config.max_num_batched_tokens < minimum:
                yield (
                    "max_num_batched_tokens",
                    f"must be at least {name} ({minimum}), got {config.max_num_batched_tokens}",
                )


def attention_backends() -> tuple[str, ...]:
    """Returns the values that `attention_backend` can have.

    A kernel set has the name of its file, so this finds them without importing `pallas_kernels` or
    jax.
    """
    package = importlib.util.find_spec("pallas_kernels")
    folders = [
        os.path.join(path, "sets")
        for path in (package and package.submodule_search_locations) or ()
    ]
    return ("auto", *(module.name for module in pkgutil.iter_modules(folders)))


def _not_honoured(config: EngineConfig) -> Iterable[Problem]:
    if config.speculative_config is not None:
        yield from (
            ("speculative_config", text) for text in config.speculative_config.find_refused()
        )
        if config.enable_lora and config.speculative_config.drafts_on_device:
            method = config.speculative_config.method
            yield (
                "speculative_config",
                f"method {method!r} is not supported with enable_lora: it drafts without adapters",
            )
    if config.prefix_cache_directory is not None and config.event_log is not None:
        yield (
            "prefix_cache_directory",
            "is not supported with event_log: a replay would not find the same blocks",
        )
    if config.event_log_weights and config.event_log is None:
        yield "event_log_weights", "needs event_log"
    if config.enable_lora and config.event_log is not None:
        yield "event_log", "is not supported with enable_lora: a replay does not load adapters"
    backend = config.attention_backend
    backends = attention_backends()
    if backend not in backends:
        nearest = nearest_name(backend, backends)
        hint = f" (did you mean {nearest!r}?)" if nearest else ""
        text = f"{show(backend)} is not supported: this version has no such kernel set{hint}"
        yield "attention_backend", f"{text}; use {' or '.join(backends)}"
