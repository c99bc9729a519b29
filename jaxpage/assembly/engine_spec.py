"""What is decided of an engine before anything of it is loaded or compiled.

It is described from settings and headers, and frozen. `jaxpage plan` prints it, the event log begins with it, and the engine is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxpage.assembly.capacity import (
    DeviceSpec,
    ModelLayout,
    choose_sharding,
    mixes,
    plan_memory,
    plan_swapping,
    step_menu,
)
from jaxpage.assembly.drafting import Drafting, check_windows
from jaxpage.assembly.recurrent import check_recurrent
from jaxpage.device import kv_pages
from jaxpage.device.backends import Backend
from jaxpage.device.buckets import BucketMenu, swapped_at_once
from jaxpage.device.cache_groups import CacheGroup, cache_groups, group_of_layers
from jaxpage.device.sizing import MemoryPlan
from jaxpage.device.step_inputs import TableShape
from jaxpage.errors import ConfigError
from jaxpage.layers.sharding import Sharding
from jaxpage.memory import pool_ids
from jaxpage.models.base import ModelSpec
from jaxpage.models.lora import LoRASpec
from jaxpage.models.sharding import kv_of_shard
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.step.limits import StepLimits


@dataclass(frozen=True)
class EngineSpec:
    """One engine. kernels: None where the device is not at hand."""

    layout: ModelLayout
    kernels: Backend | None
    sharding: Sharding
    groups: tuple[CacheGroup, ...]
    menu: BucketMenu
    limits: StepLimits
    memory: MemoryPlan
    vocab_size: int
    attention: str = ""  # the kernel sets that compute it, by kind of step; "": not known without the device
    quantization: str = ""  # of the weights, described; "": none
    dtype_reason: str = ""  # where the dtype is another than the checkpoint's, or depends on the machine

    @property
    def page_dtype(self) -> jnp.dtype:
        return kv_pages.page_dtype(self.layout.kv_cache_dtype, self.layout.dtype)

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """The cache group of each layer, a drafter's layers behind the model's."""
        return group_of_layers(self.groups)

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """P of each cache group."""
        return self.memory.blocks_of_groups(self.memory.num_blocks)

    @property
    def blocks(self) -> list[range]:
        """The ids of each group's pool."""
        return pool_ids(self.num_blocks)

    @property
    def host_blocks(self) -> list[range]:
        """The ids of each group's pool on the host."""
        return pool_ids(self.memory.blocks_of_groups(self.memory.num_host_blocks + 1))

    @property
    def tables(self) -> TableShape:
        return TableShape(len(self.groups), -(-self.memory.max_model_len // self.memory.block_size))

    def rows(self) -> Iterator[tuple[str, str]]:
        """For people."""
        dtype, cache = self.layout.dtype, self.layout.kv_cache_dtype
        yield from self.memory.rows()
        yield "dtype", f"{dtype} ({self.dtype_reason})" if self.dtype_reason else dtype
        if self.quantization:
            yield "quantization", self.quantization
        yield "KV dtype", dtype if cache == "auto" else f"{cache}, a float32 scale per token and head"
        if self.attention:
            yield "attention", self.attention + " (interpreted)" * bool(self.kernels and self.kernels.interpret)
        if self.sharding.is_divided:
            yield "reduction", self._reduction
        yield "step shapes", str(len(self.menu.buckets))

    @property
    def _reduction(self) -> str:
        shards = self.sharding
        return f"invariant, of {shards.num_shards} logical shards" if shards.invariant else "fast"

    def record(self) -> dict[str, Any]:
        """For the event log: all that decides plans."""
        memory = self.memory
        return {
            "dtype": self.layout.dtype,
            **({"sharding": list(astuple(self.sharding))} if self.sharding.is_divided else {}),
            "max_model_len": memory.max_model_len,
            "num_blocks": memory.num_blocks,
            "swap_space_blocks": memory.num_host_blocks,
            "cache_groups": [
                [group.sliding_window, len(blocks)] for group, blocks in zip(self.groups, self.blocks, strict=True)
            ],
            "vocab_size": self.vocab_size,
            "limits": asdict(self.limits),
            "buckets": [list(asdict(bucket).values()) for bucket in self.menu.buckets],
        }


def describe_engine(
    config: EngineConfig,
    model: ModelSpec,
    device: DeviceSpec,
    layout: ModelLayout,
    weights_bytes: int,
    drafting: Drafting | None = None,
    lora: LoRASpec | None = None,
    *,
    kernels: Backend | None = None,
    swaps: bool = True,
) -> EngineSpec:
    """What one device holds and runs. Of `layout`'s devices each has its part of the weights and its heads of every block.

    Args:
        weights_bytes: of the whole model, in `layout.dtype`.
        drafting: whose layers take a part of every block, and scratch blocks; each device has all of its weights.
        lora: adapters, counted as if each shard had all of them; it has a part of either A or B.
        swaps: whether the host's memory is planned as well; False for a device that is not at hand.

    Raises:
        ConfigError: `max_model_len` is beyond the model's positions, the heads cannot be divided among the devices, or no step has room
            for the drafts that are asked for.
        UnsupportedError: drafts that branch, for layers with sliding windows; what recurrent layers do not take.
        CapacityError: the weights leave no room, or one sequence of `max_model_len` does not fit; with the numbers.
    """
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model's positions end at {longest} (of LongRoPE: the original length)"
        )
    sharding = choose_sharding(config, model, device, layout.tensor_parallel_size)
    weights_bytes += drafting.num_bytes(layout.dtype) * sharding.num_devices if drafting else 0
    weights_bytes += lora.num_bytes(layout.dtype) * sharding.num_shards if lora else 0
    kvs = (kv_of_shard(model.kv, sharding), *(drafting.kvs if drafting else ()))
    check_windows(config.speculative_config, config.model, kvs)
    check_recurrent(config.model, kvs[0], layout, kvs[1:])
    menu = step_menu(config, device)
    limits = step_limits(menu, config.max_num_seqs, mixed=mixes(config, device))
    groups = cache_groups(
        kvs,
        longest=config.max_model_len or longest,
        block_size=config.block_size,
        dtype=kv_pages.page_dtype(layout.kv_cache_dtype, layout.dtype),
        num_shards=sharding.num_local,
    )
    memory = plan_memory(config, model, device, layout, weights_bytes, groups, menu, limits.longest_row, drafting)
    if swaps:
        memory = plan_swapping(config, memory)
    if memory.num_host_blocks or config.prefix_cache_directory:
        menu = replace(menu, num_swapped=swapped_at_once(memory.block_bytes))
    return EngineSpec(layout, kernels, sharding, groups, menu, limits, memory, model.vocab_size)


def step_limits(menu: BucketMenu, max_num_seqs: int, *, mixed: bool) -> StepLimits:
    """What the scheduler knows of the shapes."""
    return StepLimits(
        max_rows=max_num_seqs,
        max_tokens=menu.chunk[-1].num_tokens,
        max_chunk_rows=min(menu.max_chunk_rows, max_num_seqs),
        mixed=mixed,
        verified=tuple((bucket.num_rows, bucket.max_query_len) for bucket in menu.verify),
        trees=any(bucket.trees for bucket in menu.verify),
        decoded=tuple(bucket.num_rows for bucket in menu.decode),
        streams=tuple((bucket.num_rows, bucket.num_tokens) for bucket in menu.verify),
        num_steps=max((bucket.num_steps for bucket in menu.multi_step), default=1),
    )
