"""Declares the settings of `EngineConfig` as keyword arguments for editors and type checkers.

`EngineConfig` says what each setting means.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, cast

from numpy.typing import DTypeLike

from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.from_vllm import without_neutral
from jaxpage.settings.speculative_config import SpeculativeConfig

AnyPath = str | os.PathLike[str]


class EngineSettings(TypedDict, total=False):
    """Holds all settings but `model` and `tokenizer`, with the types that may be given for each.

    It is written by `pytest tests/test_reference.py --write-reference`, because type checkers read
    no other declaration of keywords.
    """

    # What follows is generated.
    revision: str | None
    load_format: Literal["auto", "safetensors", "orbax", "gguf"]
    dtype: Literal["auto", "float32", "bfloat16", "float16", "half", "float"] | DTypeLike
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
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8"]
    max_model_len: int | None
    block_size: int | Literal["auto"]
    num_blocks: int | None
    kv_cache_memory_bytes: int | str | None
    gpu_memory_utilization: float
    swap_space_blocks: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    num_scheduler_steps: int | Literal["auto"]
    enable_mixed_steps: bool | None
    scheduling_policy: Literal["fcfs", "priority", "fair"]
    preemption_mode: Literal["auto", "recompute", "swap"]
    new_requests_wait_until: Literal["readmitted", "completed"]
    enable_prefix_caching: bool
    prefix_cache_directory: AnyPath | None
    prefix_cache_disk_bytes: int | str
    attention_backend: str
    batch_invariant: bool
    seed: int
    speculative_config: Mapping[str, Any] | SpeculativeConfig | Literal["auto"] | None
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    enable_prompt_embeds: bool
    enable_return_hidden_states: bool
    enable_return_routed_experts: bool
    enable_return_sampling_mask: bool
    max_aborted_requests: int
    limit_images: int | None
    encoder_cache_bytes: int | str
    tensor_parallel_size: int
    tensor_parallel_reduction: Literal["auto", "invariant", "fast"]
    cudagraph_update_mode: Literal[
        "auto", "always_update", "skip_profiled", "never_update", "capture_cmd_never_update"
    ]
    cudagraph_collectives: bool
    event_log: AnyPath | None
    event_log_weights: bool
    # The end of what is generated.


class LLMSettings(EngineSettings, total=False):
    """Holds the keyword arguments of `LLM`."""

    tokenizer: AnyPath | None


def engine_config(model: AnyPath, settings: EngineSettings) -> EngineConfig:
    """Returns the configuration of a model with these settings.

    Settings of vLLM that ask for what jaxpage does anyway, such as `enforce_eager=False`, are left
    out.

    Raises:
        ConfigError: A setting is wrong.
        UnsupportedError: This version cannot honour a setting.
    """
    values = without_neutral("settings", EngineConfig.model_fields, settings)
    return EngineConfig(model=cast(str, model), **values)
