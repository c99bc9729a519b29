"""Divides a device's memory, for an engine that starts and for one that is only planned."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from jaxpage.assembly.planning.cache_groups import CacheGroup
from jaxpage.assembly.planning.described import Described, ModelLayout
from jaxpage.assembly.planning.sizing import (
    MemoryPlan,
    WindowBlocks,
    choose_num_blocks,
    choose_num_host_blocks,
)
from jaxpage.device import SCORED_AT_ONCE
from jaxpage.device.hardware import available_host_bytes
from jaxpage.device.inputs import BucketMenu, processor_shapes
from jaxpage.device.pages import bytes_of_pages, page_dtype
from jaxpage.errors import CapacityError
from jaxpage.memory import window_blocks
from jaxpage.models import ModelSpec
from jaxpage.settings.checked_settings import UnsupportedSettings
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.tables import gib


def plan_memory(
    described: Described,
    weights_bytes: int,
    groups: Sequence[CacheGroup],
    menu: BucketMenu,
    *,
    max_row_length: int,
    swaps: bool,
) -> MemoryPlan:
    """Divides the memory of one device, and decides whether blocks can be swapped.

    Args:
        described: The model, the device and the settings.
        weights_bytes: The bytes of all weights on all devices.
        groups: The cache groups; the one that sees the longest context comes first.
        menu: The shapes of the steps.
        max_row_length: The most tokens that a sequence can have in a step.
        swaps: True if the host's memory is planned, too; see `engine_spec_of`.

    Raises:
        CapacityError: The memory is too small; the message has the numbers.
    """
    config = described.config
    device = described.device
    plan = choose_num_blocks(
        _without_blocks(described, weights_bytes, groups, menu, max_row_length),
        requested=config.num_blocks,
        pool_bytes=config.kv_cache_memory_bytes,
        max_num_seqs=config.max_num_seqs,
        narrower_dtype="bfloat16" if described.layout.dtype == "float32" else None,
        utilization=1.0 if device.is_cpu else config.gpu_memory_utilization,
    )
    # One block of the pool is the null block, which holds no token.
    if plan.blocks_for(plan.max_model_len) >= plan.num_blocks:
        if config.max_model_len is not None:
            raise CapacityError(
                f"One sequence of max_model_len = {plan.max_model_len} tokens does not fit in the "
                f"KV pool of {plan.num_slots} slots "
                f"({plan.num_blocks - 1} blocks of {plan.block_size}). "
                f"{_how_to_fit_one(config, plan)}"
            )
        plan = replace(plan, max_model_len=plan.num_slots, max_sequence_blocks=None)
    # A group with one sequence recomputes, and with max_num_seqs = 1 every group has one.
    recomputes = config.preemption_mode == "recompute" or (
        config.preemption_mode == "auto" and config.max_num_seqs == 1
    )
    if not swaps or recomputes:
        return plan
    plan = choose_num_host_blocks(
        plan,
        requested=config.swap_space_blocks,
        available=available_host_bytes(),
        on_disk=_bytes_on_disk(config.prefix_cache_directory, config.prefix_cache_disk_bytes),
    )
    if config.preemption_mode == "swap" and not plan.num_host_blocks:
        raise CapacityError(
            "preemption_mode is 'swap', but the host's free memory holds no block of "
            f"{gib(plan.block_bytes)} next to what else "
            "is in it. Free memory, or use preemption_mode 'recompute'."
        )
    return plan


def _without_blocks(
    described: Described,
    weights_bytes: int,
    groups: Sequence[CacheGroup],
    menu: BucketMenu,
    max_row_length: int,
) -> MemoryPlan:
    """Returns the plan without the number of blocks; see `plan_memory`."""
    config = described.config
    device = described.device
    layout = described.layout
    drafting = described.drafting
    first, *further = groups
    max_length = config.max_model_len or described.model.max_position_embeddings
    workspace_bytes = _workspace_estimate(described.model, max_length, menu)
    if config.batch_invariant:
        workspace_bytes += _ordered_bytes(described, max_length, menu)
    vision_bytes = 0
    if (vectors := described.vectors) is not None:
        vision_bytes = vectors.vision_bytes(layout.dtype)
        encoder_bytes = vectors.vision_workspace_bytes(max_length, layout.dtype)
        workspace_bytes = max(workspace_bytes, encoder_bytes)
    dtype = page_dtype(layout.kv_cache_dtype, layout.dtype)
    if drafting.kvs:
        scratch = drafting.pages(
            menu,
            [0] * drafting.num_layers,  # without the pool: scratch blocks alone
            described.block_size,
            dtype,
            interleaved=described.interleaves_pages,
        )
        workspace_bytes += bytes_of_pages(scratch)

    def at_a_time(window: int) -> int:
        return window_blocks(window, max_row_length, described.block_size)

    return MemoryPlan(
        device=device.name,
        available_bytes=device.available_bytes,
        weights_bytes=-(-weights_bytes // layout.tensor_parallel_size),
        workspace_bytes=workspace_bytes,
        block_bytes=sum(group.block_bytes for group in groups),
        block_size=described.block_size,
        num_blocks=0,
        num_devices=layout.tensor_parallel_size,
        max_model_len=max_length,
        max_sequence_blocks=None
        if first.sliding_window is None
        else at_a_time(first.sliding_window),
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
        unaddressable=device.unaddressable_blocks(
            config.attention_backend,
            max(group.array_elements for group in groups),
            dtype,
        ),
        vision_bytes=vision_bytes,
        encoder_cache_bytes=config.encoder_cache_bytes,
    )


def _how_to_fit_one(config: EngineConfig, plan: MemoryPlan) -> str:
    """Returns the part of a message that says how a sequence of `max_model_len` tokens would fit.

    Either the sequence gets shorter, or the pool larger, if there is memory for it.
    """
    shorter = f"Lower max_model_len to {plan.num_slots} or less"
    num_blocks = 1 + plan.blocks_for(plan.max_model_len)
    num_bytes = plan.bytes_of(num_blocks)
    if num_bytes > plan.free_bytes:
        return (
            f"{shorter}: {num_blocks} blocks would take {gib(num_bytes)}, and "
            f"{gib(plan.free_bytes)} are free for the pool."
        )
    by_bytes = config.kv_cache_memory_bytes is not None
    setting = f"kv_cache_memory_bytes to {num_bytes}" if by_bytes else f"num_blocks to {num_blocks}"
    return f"{shorter}, or raise {setting} or more."


def notices(described: Described, plan: MemoryPlan) -> list[str]:
    """Returns warnings about settings whose effect is not what their values suggest."""
    config = described.config
    device = described.device
    max_length = described.model.max_position_embeddings
    notices_list = [device.notice] if device.notice else []
    if device.is_cpu and "gpu_memory_utilization" in config.model_fields_set:
        notices_list.append(
            f"gpu_memory_utilization = {config.gpu_memory_utilization:g} means nothing on a CPU: "
            "num_blocks or kv_cache_memory_bytes "
            "size the pool here"
        )
    if not plan.block_bytes:  # an encoder: its files may say how long a text is
        return notices_list
    if config.max_model_len is None and plan.max_model_len < max_length:
        notices_list.append(
            f"max_model_len is {plan.max_model_len}, as many tokens as the KV pool holds; the "
            "model could take "
            f"{max_length}: num_blocks or kv_cache_memory_bytes give it more memory"
        )
    if config.num_blocks is None and plan.num_blocks + 1 == plan.unaddressable[0]:
        notices_list.append(
            f"the KV pool has {plan.num_blocks} blocks, {gib(plan.pool_bytes)} of "
            f"{gib(plan.free_bytes)} that are free: with more, the "
            "one-byte keys of a layer have 2^31 elements, which the attention kernels for GPUs "
            "cannot address"
        )
    counts = plan.blocks_of_groups(plan.num_blocks)[1:]
    for states, count in zip(plan.windows, counts, strict=True):
        if states.is_state and count <= states.max_blocks:
            notices_list.append(
                f"there are {plan.num_blocks - 1} KV blocks and no more, since a sequence takes up "
                f"to {states.sequence_blocks} state "
                f"blocks of {gib(states.block_bytes)} while its prompt is computed: a lower "
                "max_num_batched_tokens or max_num_seqs, or a larger block_size, leaves room for "
                "more"
            )
    return notices_list


def _ordered_bytes(described: Described, context: int, menu: BucketMenu) -> int:
    """Returns the bytes of the sums that kernels keep apart in steps of few tokens a row."""
    kv = described.model.kv
    tokens = (
        bucket.num_rows if bucket.num_steps > 1 else bucket.num_tokens
        for bucket in (*menu.decode, *menu.multi_step, *menu.verify)
    )
    heads = -(-described.model.num_query_heads // described.layout.tensor_parallel_size)
    width = kv.value_width or kv.head_dim
    return described.device.ordered_bytes(max(tokens), heads * width, context)


def _bytes_on_disk(prefix_cache_directory: str | None, maximum: int) -> int:
    """Returns the bytes that swapped blocks may take in the directory of the prefix cache."""
    if prefix_cache_directory is None:
        return 0
    directory = Path(prefix_cache_directory)
    # The directory may be made later, on the disk of the nearest one that is there.
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    return min(maximum, shutil.disk_usage(nearest).free)


def find_refused_settings(config: EngineConfig, layout: ModelLayout) -> tuple[str, ...]:
    """Returns the settings that this version refuses together with that layout.

    Raises:
        ConfigError: The layout itself is not valid.
    """
    try:
        config.replace(**asdict(layout))
    except UnsupportedSettings as error:
        return tuple(name for name, _ in error.problems)
    return ()


def _workspace_estimate(spec: ModelSpec, context: int, menu: BucketMenu) -> int:
    """Estimates the workspace in bytes before anything is compiled.

    It has the logits and the arrays that draws or scores make of them, a dozen float32 activations
    of the widest step, and the arrays that take the place of unused inputs of logits processors.
    """
    num_draws = {bucket.num_processed for bucket in menu.buckets}
    tokens = max(bucket.num_tokens for bucket in menu.buckets)
    logits = max(9 * max(num_draws), 3 * min(tokens, SCORED_AT_ONCE)) * spec.vocab_size
    shapes = [
        processor_shapes(draws, vocab_size=spec.vocab_size, context=context) for draws in num_draws
    ]
    neutral: int = sum(math.prod(array.shape) for each in shapes for array in each)
    return 4 * (logits + 24 * tokens * spec.hidden_size + neutral)
