"""`EngineConfig`: every setting of an engine, checked together before anything is loaded. Where values come from: `config_sources`."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from jaxpage.settings.argument_checks import shown
from jaxpage.settings.base import ByteSize, Problem, Settings, nearest_name
from jaxpage.settings.speculative_config import AcceptanceRule, SpeculativeConfig

_MAX_BLOCK_SIZE = 128
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


class EngineConfig(Settings):
    """The settings of an engine."""

    nested: ClassVar[Mapping[str, type[BaseModel]]] = {"speculative_config": SpeculativeConfig}
    plain_text: ClassVar[frozenset[str]] = frozenset({"model", "tokenizer", "revision", "event_log"})

    model: _Name = "demo"  # "demo", a local directory, or a hub id
    tokenizer: _Name | None = None  # where its files are; None: with the model
    revision: str | None = None  # of the hub repository
    load_format: Literal["auto", "safetensors", "orbax"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of weights
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"  # of KV pages; "auto": that of weights
    max_model_len: Annotated[int, Field(ge=2, lt=2**31)] | None = None  # prompt and output together; None: the model's
    block_size: Annotated[_Count, AfterValidator(_power_of_two)] = 16  # slots of a KV block
    num_blocks: Annotated[int, Field(ge=2, lt=2**31)] | None = (
        None  # of the KV pool, null block included; None: what fits
    )
    kv_cache_memory_bytes: ByteSize | None = None  # of the KV pool, in place of num_blocks
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9  # share of the device's memory that may be used
    swap_space_blocks: Annotated[int, Field(ge=0, lt=2**31)] | None = (
        None  # of host memory; None: as many as the KV pool
    )
    max_num_seqs: _Count = 64  # sequences in a step
    max_num_batched_tokens: _Count | None = None  # query tokens in a step
    enable_mixed_steps: bool | None = (
        None  # decoding sequences and prompt chunks in one step; None: as the backend wants
    )
    scheduling_policy: Literal["fcfs", "priority", "fair"] = "fcfs"  # who is admitted next, and who gives way
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"  # "auto": one sequence recomputes, several swap
    new_requests_wait_until: Literal["readmitted", "completed"] = (
        "readmitted"  # until preempted requests are; the urgent do not wait
    )
    enable_prefix_caching: bool = True  # requests share the KV blocks of what was computed before
    attention_backend: str = "auto"  # a kernel set; "auto": the first that takes the call
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0  # of the seeds that requests without one are given
    speculative_config: SpeculativeConfig | None = None  # how what follows is drafted; None: it is not
    tensor_parallel_size: _Count = 1
    event_log: _Name | None = None  # new file of everything that a replay needs, prompts included

    @property
    def acceptance(self) -> AcceptanceRule:
        """Which drafts become tokens."""
        return self.speculative_config.rule if self.speculative_config else AcceptanceRule()

    def contradictions(self) -> Iterable[Problem]:
        return _contradictions(self)

    def refused(self) -> Iterable[Problem]:
        return _not_honoured(self)


def _contradictions(config: EngineConfig) -> Iterable[Problem]:
    if config.num_blocks is not None and config.kv_cache_memory_bytes is not None:
        yield (
            "num_blocks",
            f"cannot be {config.num_blocks} while kv_cache_memory_bytes is {config.kv_cache_memory_bytes}: both size the pool",
        )
    if config.preemption_mode == "swap" and config.swap_space_blocks == 0:
        yield "preemption_mode", "cannot be 'swap' while swap_space_blocks is 0: there is nowhere to swap to"
    if config.preemption_mode == "recompute" and config.swap_space_blocks:
        yield (
            "swap_space_blocks",
            f"cannot be {config.swap_space_blocks} while preemption_mode is 'recompute': nothing is swapped",
        )
    if config.preemption_mode == "auto" and config.max_num_seqs == 1 and config.swap_space_blocks:
        yield (
            "swap_space_blocks",
            f"cannot be {config.swap_space_blocks} while max_num_seqs is 1 and preemption_mode 'auto': one sequence recomputes",
        )
    if config.scheduling_policy == "priority" and config.new_requests_wait_until == "completed":
        yield (
            "new_requests_wait_until",
            "cannot be 'completed' while scheduling_policy is 'priority': requests of higher priority do not wait",
        )
    if config.speculative_config is not None:
        yield from (("speculative_config", text) for text in config.speculative_config.problems())
    if config.max_num_batched_tokens is not None:
        for name in ("max_num_seqs", "block_size"):
            if config.max_num_batched_tokens < getattr(config, name):
                yield (
                    "max_num_batched_tokens",
                    f"must be at least {name} ({getattr(config, name)}), got {config.max_num_batched_tokens}",
                )


def attention_backends() -> tuple[str, ...]:
    """The values of that setting. A kernel set has the name of its file, so that it is found without importing `pallas_kernels` and jax."""
    package = importlib.util.find_spec("pallas_kernels")
    folders = [os.path.join(path, "sets") for path in (package and package.submodule_search_locations) or ()]
    return ("auto", *(module.name for module in pkgutil.iter_modules(folders)))


def _not_honoured(config: EngineConfig) -> Iterable[Problem]:
    if config.speculative_config is not None:
        yield from (("speculative_config", text) for text in config.speculative_config.refused())
    backend, backends = config.attention_backend, attention_backends()
    if backend not in backends:
        nearest = nearest_name(backend, backends)
        hint = f" (did you mean {nearest!r}?)" if nearest else ""
        text = f"{shown(backend)} is not supported: this version has no such kernel set{hint}"
        yield "attention_backend", f"{text}; use {' or '.join(backends)}"
    if (size := config.tensor_parallel_size) != 1:
        yield "tensor_parallel_size", f"{size} is not supported: this version runs on one device; use 1"
