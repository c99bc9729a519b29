"""Divides a device's memory, for an engine that starts and for one that is only planned."""

from __future__ import annotations

import logging
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from jaxpage.assembly.described import Described, DeviceSpec, ModelLayout
from jaxpage.device import kv_pages
from jaxpage.device.backends import prefers_mixed_steps, unaddressable_blocks
from jaxpage.device.buckets import BucketMenu, make_menu
from jaxpage.device.cache_groups import CacheGroup
from jaxpage.device.cpu_products import NUM_ROWS, cpu_products
from jaxpage.device.sizing import (
    MemoryPlan,
    WindowBlocks,
    available_host_bytes,
    choose_num_blocks,
    choose_num_host_blocks,
    gib,
)
from jaxpage.device.step_inputs import processor_shapes
from jaxpage.device.steps import SCORED_AT_ONCE
from jaxpage.errors import CapacityError, ConfigError, UnsupportedError
from jaxpage.layers.sharding import Sharding
from jaxpage.memory.block_tables import window_blocks
from jaxpage.models.base import Family, ModelSpec
from jaxpage.models.quantization.scheme import Scheme
from jaxpage.models.sharding import LOGICAL_SHARDS, make_sharding
from jaxpage.settings.base import UnsupportedSettings
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.shapes import MOST_CANDIDATES

logger = logging.getLogger(__name__)

BATCHED_TOKENS_ON_CPU = 256  # keep a CPU busy
BATCHED_TOKENS_ON_ACCELERATORS = 2048


def choose_sharding(described: Described) -> Sharding:
    """Returns how the model is divided. Raises ConfigError where the devices cannot share it."""
    asked, num_devices = described.config.tensor_parallel_reduction, described.layout.tensor_parallel_size
    invariant = asked == "invariant" or (
        asked == "auto" and described.device.is_cpu and num_devices > 1 and LOGICAL_SHARDS % num_devices == 0
    )
    return make_sharding(described.model, num_devices, invariant=invariant)


def choose_dtype(config: EngineConfig, device: DeviceSpec, stored: str, family: Family) -> str:
    """Returns the dtype of a model. "auto" follows the checkpoint, but on CPU it is float32 unless the
    checkpoint is in bfloat16 and that is faster there.

    On a GPU without bfloat16 "auto" is float16, with a warning. A family whose numbers float16 does not hold has bfloat16 or float32 in
    its place.

    Raises UnsupportedError where bfloat16 is asked for by name on such a GPU, or float16 for such a family.
    """
    overflows = getattr(family, "OVERFLOWS_FLOAT16", False)
    instead = "float32" if overflows else "float16"
    lacking = f"{device.name} has no bfloat16, which takes a compute capability of 8.0 or more"
    if config.dtype == "bfloat16" and not device.has_bfloat16:
        raise UnsupportedError(f"dtype 'bfloat16': {lacking}; use dtype {instead!r}")
    if config.dtype == "float16" and overflows:
        held = "bfloat16" if device.has_bfloat16 else "float32"
        raise UnsupportedError(
            f"dtype 'float16': it does not hold this model's numbers, which overflow; use dtype {held!r}"
        )
    if config.dtype != "auto":
        return config.dtype
    if stored == "float16" and overflows and not device.is_cpu:
        stored = "bfloat16"
    if stored == "bfloat16" and not device.has_bfloat16:
        logger.warning("%s: dtype 'auto' is %s", lacking, instead)
        return instead
    if device.is_cpu and not (stored == "bfloat16" and cpu_products().prefer_bfloat16):
        return "float32"
    return stored


def choose_kv_cache_dtype(config: EngineConfig, spec: ModelSpec, quantization: Scheme | None) -> str:
    """Returns the dtype of the KV cache.

    "auto" follows a quantised checkpoint, unless the model has recurrent layers, whose pages are
    never quantised.
    """
    if config.kv_cache_dtype != "auto" or quantization is None or any(spec.kv.states):
        return config.kv_cache_dtype
    return quantization.kv_cache_dtype


def dtype_reason(config: EngineConfig, device: DeviceSpec, stored: str) -> str:
    """Returns why "auto" is what it is, where that depends on the machine."""
    if config.dtype != "auto" or not device.is_cpu or stored == "float32":
        return ""
    if stored != "bfloat16":
        return f"the checkpoint is in {stored}"
    products = cpu_products()
    times = ", ".join(f"{ratio:.1f}" for ratio in products.time_of_bfloat16)
    hint = "" if products.prefer_bfloat16 or sys.version_info >= (3, 12) else "; with Python 3.12 a newer JAX is faster"
    return f"bfloat16 matrix products take {times} times as long as float32 ones here, for {' and '.join(map(str, NUM_ROWS))} rows{hint}"


def mixes(config: EngineConfig, device: DeviceSpec) -> bool:
    """Returns whether prompt chunks and decodes share a step; by default, as the kernel set prefers.

    A GPU's kernel takes any rows in one launch. In plain XLA a step that mixes them pads every
    single token to a tile of queries.
    """
    if config.enable_mixed_steps is not None:
        return config.enable_mixed_steps
    return prefers_mixed_steps(config.attention_backend, device.platform)


def step_menu(config: EngineConfig, device: DeviceSpec, *, mixed: bool) -> BucketMenu:
    """Returns the shapes of an engine's steps. mixed: see `mixes`.

    Raises ConfigError if none of them has room for drafts that are asked for.
    """
    drafts, most = config.speculative_config, config.max_num_batched_tokens
    if most is None:
        most = BATCHED_TOKENS_ON_CPU if device.is_cpu else BATCHED_TOKENS_ON_ACCELERATORS
    most = max(most, 2)
    menu = make_menu(
        config.max_num_seqs,
        most,
        mixed=mixed,
        num_drafts=drafts.draft_lengths if drafts else (),
        max_verified_tokens=most,
        trees=drafts is not None and drafts.branches,
        q_width=MOST_CANDIDATES if config.acceptance.name == "rejection" else 0,
        num_steps=config.num_scheduler_steps,
    )
    if drafts is not None and not menu.verify:
        raise ConfigError(
            f"speculative_config: the smallest step with drafts has {1 + min(drafts.draft_lengths)} tokens; "
            f"max_num_batched_tokens is {most}"
        )
    return menu


def plan_memory(
    described: Described, weights_bytes: int, groups: Sequence[CacheGroup], menu: BucketMenu, *, longest_row: int
) -> MemoryPlan:
    """Divides the memory of one device: see `engine_spec_of`.

    weights_bytes: on all devices. longest_row: tokens that a sequence can have in a step.
    """
    config, device, layout, drafting = described.config, described.device, described.layout, described.drafting
    first, *further = groups
    longest = config.max_model_len or described.model.max_position_embeddings
    page_dtype = kv_pages.page_dtype(layout.kv_cache_dtype, layout.dtype)
    scratch = drafting.pages(menu, [0] * drafting.num_layers, config.block_size, page_dtype)

    def at_a_time(window: int) -> int:
        return window_blocks(window, longest_row, config.block_size)

    plan = MemoryPlan(
        device=device.name,
        available_bytes=device.available_bytes,
        weights_bytes=-(-weights_bytes // layout.tensor_parallel_size),
        workspace_bytes=_workspace_estimate(described.model, longest, menu) + kv_pages.num_bytes(scratch),
        block_bytes=sum(group.block_bytes for group in groups),
        block_size=config.block_size,
        num_blocks=0,
        num_devices=layout.tensor_parallel_size,
        max_model_len=longest,
        most_sequence_blocks=None if first.sliding_window is None else at_a_time(first.sliding_window),
        windows=tuple(
            WindowBlocks(
                group.sliding_window,
                group.block_bytes,
                at_a_time(group.sliding_window),
                config.max_num_seqs * at_a_time(group.sliding_window),
                group.is_state,
            )
            for group in further
            if group.sliding_window is not None
        ),
        unaddressable=unaddressable_blocks(
            config.attention_backend, device.platform, max(group.array_elements for group in groups), page_dtype
        ),
    )
    plan = choose_num_blocks(
        plan,
        wanted=config.num_blocks,
        pool_bytes=config.kv_cache_memory_bytes,
        max_num_seqs=config.max_num_seqs,
        narrower_dtype="bfloat16" if layout.dtype == "float32" else None,
        utilization=1.0 if device.is_cpu else config.gpu_memory_utilization,
    )
    if plan.blocks_for(plan.max_model_len) < plan.num_blocks:
        return plan
    if config.max_model_len is not None:
        raise CapacityError(
            f"One sequence of max_model_len = {plan.max_model_len} tokens does not fit in the KV pool of {plan.num_slots} slots "
            f"({plan.num_blocks - 1} blocks of {plan.block_size}). {_how_to_fit_one(config, plan)}"
        )
    return replace(plan, max_model_len=plan.num_slots, most_sequence_blocks=None)


def _how_to_fit_one(config: EngineConfig, plan: MemoryPlan) -> str:
    """Returns what lets a sequence of `max_model_len` tokens into the pool.

    That is a shorter one, or a larger pool if there is room for it.
    """
    shorter = f"Lower max_model_len to {plan.num_slots} or less"
    num_blocks = 1 + plan.blocks_for(plan.max_model_len)
    num_bytes = plan.bytes_of(num_blocks)
    if num_bytes > plan.free_bytes:
        return f"{shorter}: {num_blocks} blocks would take {gib(num_bytes)}, and {gib(plan.free_bytes)} are free for the pool."
    by_bytes = config.kv_cache_memory_bytes is not None
    setting = f"kv_cache_memory_bytes to {num_bytes}" if by_bytes else f"num_blocks to {num_blocks}"
    return f"{shorter}, or raise {setting} or more."


def notices(described: Described, plan: MemoryPlan) -> list[str]:
    """Returns warnings about settings whose effect is not what their values suggest."""
    config, device, longest = described.config, described.device, described.model.max_position_embeddings
    found = [device.notice] if device.notice else []
    if device.is_cpu and "gpu_memory_utilization" in config.model_fields_set:
        found.append(
            f"gpu_memory_utilization = {config.gpu_memory_utilization:g} means nothing on a CPU: num_blocks or kv_cache_memory_bytes "
            "size the pool here"
        )
    if config.max_model_len is None and plan.max_model_len < longest:
        found.append(
            f"max_model_len is {plan.max_model_len}, as many tokens as the KV pool holds; the model could take "
            f"{longest}: num_blocks or kv_cache_memory_bytes give it more memory"
        )
    if config.num_blocks is None and plan.num_blocks + 1 == plan.unaddressable[0]:
        found.append(
            f"the KV pool has {plan.num_blocks} blocks, {gib(plan.pool_bytes)} of {gib(plan.free_bytes)} that are free: with more, the "
            "one-byte keys of a layer have 2^31 elements, which the attention kernels for GPUs cannot address"
        )
    counts = plan.blocks_of_groups(plan.num_blocks)[1:]
    for states, count in zip(plan.windows, counts, strict=True):
        if states.is_state and count <= states.most_blocks:
            found.append(
                f"there are {plan.num_blocks - 1} KV blocks and no more, since a sequence takes up to {states.sequence_blocks} state "
                f"blocks of {gib(states.block_bytes)} while its prompt is computed: a lower max_num_batched_tokens leaves room for more"
            )
    return found


def plan_swapping(config: EngineConfig, plan: MemoryPlan) -> MemoryPlan:
    """Decides, and nothing else does, whether anything can be swapped: `num_host_blocks` says how much."""
    if config.preemption_mode == "recompute" or (config.preemption_mode == "auto" and config.max_num_seqs == 1):
        return plan  # nothing swaps: one sequence recomputes, and there is never more than one
    on_disk = _bytes_on_disk(Path(config.prefix_cache_directory), config) if config.prefix_cache_directory else 0
    plan = choose_num_host_blocks(
        plan, wanted=config.swap_space_blocks, available=available_host_bytes(), on_disk=on_disk
    )
    if config.preemption_mode == "swap" and not plan.num_host_blocks:
        raise CapacityError(
            f"preemption_mode is 'swap', but the host's free memory holds no block of {gib(plan.block_bytes)} next to what else "
            "is in it. Free memory, or use preemption_mode 'recompute'."
        )
    return plan


def _bytes_on_disk(directory: Path, config: EngineConfig) -> int:
    """Returns the bytes that swapped blocks may take there: they count as those of the prefix cache."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    return min(config.prefix_cache_disk_bytes, shutil.disk_usage(there).free)


def refused_settings(config: EngineConfig, layout: ModelLayout) -> tuple[str, ...]:
    """Returns the settings that keep this version from running a model in that layout.

    Raises ConfigError for what is no layout at all.
    """
    try:
        config.replace(**asdict(layout))
    except UnsupportedSettings as error:
        return tuple(name for name, _ in error.problems)
    return ()


def _workspace_estimate(spec: ModelSpec, context: int, menu: BucketMenu) -> int:
    """Estimates the workspace before anything is compiled.

    It has logits with what draws or scores make of them, a dozen activations of the widest step, in
    float32, and the arrays that stand in for inputs of logits processors.
    """
    num_draws = {bucket.num_draws for bucket in menu.buckets}
    tokens = max(bucket.num_tokens for bucket in menu.buckets)
    logits = max(9 * max(num_draws), 3 * min(tokens, SCORED_AT_ONCE)) * spec.vocab_size
    shapes = [processor_shapes(draws, vocab_size=spec.vocab_size, context=context) for draws in num_draws]
    neutral: int = sum(math.prod(array.shape) for each in shapes for array in each)
    return 4 * (logits + 24 * tokens * spec.model_width + neutral)
