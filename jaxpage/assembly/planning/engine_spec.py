"""Defines the specification of an engine: all that is decided before anything is compiled.

It is frozen. `jaxpage plan` prints it, the event log begins with it, and the engine is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpage.assembly.planning import encoders
from jaxpage.assembly.planning.cache_groups import CacheGroup, cache_groups, group_of_layers
from jaxpage.assembly.planning.capacity import plan_memory
from jaxpage.assembly.planning.described import Described, ModelLayout
from jaxpage.assembly.planning.drafted_engine import DraftedEngine
from jaxpage.assembly.planning.layer_kinds import (
    check_batch_invariant,
    check_recurrent,
    check_windows,
)
from jaxpage.assembly.planning.sizing import MemoryPlan
from jaxpage.assembly.planning.vectors import VectorInput
from jaxpage.device.hardware import DeviceMesh, DeviceSpec, attention_sets
from jaxpage.device.inputs import Bucket, BucketMenu, TableShape, make_menu
from jaxpage.device.pages import KVPages, divide_shapes, page_dtype, page_shapes
from jaxpage.errors import ConfigError
from jaxpage.layers.sharding import Sharding
from jaxpage.memory import pool_ids
from jaxpage.models import ModelSpec
from jaxpage.models.sharding import LOGICAL_SHARDS, kv_of_shard, make_sharding
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.shapes import MAX_CANDIDATES
from jaxpage.step.limits import StepLimits

BATCHED_TOKENS_ON_CPU = 256  # enough to keep a CPU busy
BATCHED_TOKENS_ON_ACCELERATORS = 2048
# Decode steps of an executable where num_scheduler_steps is "auto". On an accelerator the host
# takes 0.4 to 0.7 ms of every step of 6 to 10; on a CPU steps are longer, and a second executable
# for each number of rows costs the start more.
STEPS_ON_CPU = 1
STEPS_ON_ACCELERATORS = 8


@dataclass(frozen=True)
class EngineSpec:
    """Holds all decisions about one engine, and the facts that they were made from.

    Attributes:
        described: The model, the device and the settings.
        sharding: The division of the model over devices.
        groups: The cache groups.
        menu: The shapes of the steps.
        limits: The limits of these shapes, for the scheduler.
        memory: The division of a device's memory.
        attention: The kernel sets by kind of step; empty without `described.kernels`.
        quantization: A description of the weights' quantisation; empty if there is none.
        encoded: The numbers of tokens for which an encoder is compiled; empty for a decoder.
    """

    described: Described
    sharding: Sharding
    groups: tuple[CacheGroup, ...]
    menu: BucketMenu
    limits: StepLimits
    memory: MemoryPlan
    attention: str = ""
    quantization: str = ""
    encoded: tuple[int, ...] = ()

    @property
    def config(self) -> EngineConfig:
        """Returns the settings of the engine."""
        return self.described.config

    @property
    def layout(self) -> ModelLayout:
        """Returns the types of the model's numbers and the number of its devices."""
        return self.described.layout

    @property
    def drafted(self) -> DraftedEngine:
        """Returns what the drafter is told of the engine."""
        return DraftedEngine(
            self.layout.dtype,
            self.sharding,
            self.described.kernels,
            self.menu,
            self.layer_groups,
            self.num_blocks,
            self.config.acceptance.name,
        )

    @property
    def vocab_size(self) -> int:
        """Returns the number of the model's token ids (V)."""
        return self.described.model.vocab_size

    @property
    def vectors(self) -> jax.ShapeDtypeStruct | None:
        """Returns the shape and type of what may take the place of a token; None if nothing may."""
        vectors = self.described.vectors
        return None if vectors is None else vectors.shape(self.layout.dtype)

    @property
    def page_dtype(self) -> jnp.dtype:
        """Returns the type of the numbers in the KV pages."""
        return page_dtype(self.layout.kv_cache_dtype, self.layout.dtype)

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """Returns the cache group of each layer, the model's layers first, then a drafter's."""
        return group_of_layers(self.groups)

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Returns the number of blocks on the device (P), for each cache group."""
        return self.memory.blocks_of_groups(self.memory.num_blocks)

    @property
    def blocks(self) -> list[range]:
        """Returns the block ids of each cache group's pool."""
        return pool_ids(self.num_blocks)

    @property
    def host_blocks(self) -> list[range]:
        """Returns the block ids of each cache group's pool on the host."""
        return pool_ids(self.memory.blocks_of_groups(self.memory.num_host_blocks + 1))

    @property
    def tables(self) -> TableShape:
        """Returns the shape of the block tables."""
        width = -(-self.memory.max_model_len // self.memory.block_size)
        if (vectors := self.described.vectors) is None:
            return TableShape(len(self.groups), width)
        return TableShape(
            len(self.groups), width, vectors.num_axes, sees_ahead=vectors.num_whole > 0
        )

    @property
    def pages_of_shard(self) -> KVPages:
        """Returns the shapes of the pages of the model's layers, in one of its shards."""
        kv = self.described.model.kv
        num_blocks = [self.num_blocks[group] for group in self.layer_groups[: kv.num_layers]]
        return page_shapes(
            kv_of_shard(kv, self.sharding),
            num_blocks,
            self.memory.block_size,
            self.page_dtype,
            interleaved=self.described.interleaves_pages,
        )

    def pages(self, mesh: DeviceMesh) -> KVPages:
        """Returns the shapes of the pages of all layers.

        A model that is divided has the pages of each layer once for each shard of a device. Each
        device has all pages of a drafter.
        """
        pages = divide_shapes(self.pages_of_shard, self.sharding.num_local, mesh)
        if not (drafting := self.described.drafting).kvs:
            return pages
        num_blocks = [
            self.num_blocks[group]
            for group in self.layer_groups[self.described.model.kv.num_layers :]
        ]
        drafter_pages = drafting.pages(
            self.menu,
            num_blocks,
            self.memory.block_size,
            self.page_dtype,
            interleaved=self.described.interleaves_pages,
        )
        drafters: KVPages = mesh.whole(drafter_pages)
        return pages + drafters

    @property
    def page_groups(self) -> tuple[int, ...]:
        """Returns the cache group of each element of `pages`; see `StepOptions.layer_groups`."""
        num_layers = self.described.model.kv.num_layers
        of_model = (
            group
            for group in self.layer_groups[:num_layers]
            for _ in range(self.sharding.num_local)
        )
        return (*of_model, *self.layer_groups[num_layers:])

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yields the name and the text of each row of the table that a start prints."""
        dtype = self.layout.dtype
        cache = self.layout.kv_cache_dtype
        yield from self.memory.rows()
        reason = self.described.dtype_reason
        yield "dtype", f"{dtype} ({reason})" if reason else dtype
        if self.quantization:
            yield "quantization", self.quantization
        if self.encoded:
            yield "tokens of a call", ", ".join(f"{size:,}" for size in self.encoded)
            return
        yield (
            "KV dtype",
            dtype if cache == "auto" else f"{cache}, a float32 scale per token and head",
        )
        if self.attention:
            yield (
                "attention",
                self.attention
                + " (interpreted)"
                * bool(self.described.kernels and self.described.kernels.interpret),
            )
        if self.sharding.is_divided:
            yield "reduction", self.reduction.partition(" on ")[0]
        yield "step shapes", str(len(self.menu.buckets))
        if drafts := self.described.drafting.config:
            number = drafts.num_speculative_tokens
            chosen = "as many drafts as pay" if number == "auto" else f"{number} drafts"
            shape = "a tree of " * drafts.tree
            yield "speculation", f"{drafts.method}, {shape}{chosen}, acceptance {drafts.acceptance}"
        if (num_steps := self.limits.num_steps) > 1:
            adapts = self.limits.adapts_num_steps
            few = f"1 to {num_steps}, more the longer no request waits or comes"
            yield "decode steps at once", few if adapts else str(num_steps)

    @property
    def reduction(self) -> str:
        """Returns the order of sums over the parts of a divided model; empty for a whole one."""
        shards = self.sharding
        if not shards.is_divided:
            return ""
        if shards.invariant:
            return f"invariant, of {shards.num_shards} logical shards"
        return f"fast on {shards.num_devices} devices"

    def record(self) -> dict[str, Any]:
        """Returns all decisions that plans depend on, for the event log."""
        memory = self.memory
        return {
            "dtype": self.layout.dtype,
            **({"sharding": list(astuple(self.sharding))} if self.sharding.is_divided else {}),
            "max_model_len": memory.max_model_len,
            "num_blocks": memory.num_blocks,
            "swap_space_blocks": memory.num_host_blocks,
            "cache_groups": [
                [group.sliding_window, len(blocks)]
                for group, blocks in zip(self.groups, self.blocks, strict=True)
            ],
            "vocab_size": self.vocab_size,
            "limits": _record_limits(self.limits),
            "buckets": [_record(bucket) for bucket in self.menu.buckets],
        }


def _record_limits(limits: StepLimits) -> dict[str, Any]:
    """Returns limits for the event log: their last field is there where it says something."""
    fields = asdict(limits)
    if not limits.adapts_num_steps:
        del fields["adapts_num_steps"]
    return fields


def _record(bucket: Bucket) -> list[Any]:
    """Returns a bucket for the event log: its last field is there where it says something."""
    values = list(asdict(bucket).values())
    return values if bucket.takes_vectors else values[:-1]


def engine_spec_of(described: Described, *, swaps: bool = True) -> EngineSpec:
    """Decides what one device holds and runs.

    Args:
        described: The model, the device and the settings.
        swaps: True if the host's memory is planned as well; False for a device that is not at hand.

    Raises:
        ConfigError: `max_model_len` is beyond the model's positions, the heads cannot be divided
            among the devices, or no step has room for the drafts that the settings ask for.
        UnsupportedError: Layers with sliding windows or recurrent layers do not take a setting.
        CapacityError: The weights leave no room, or one sequence of `max_model_len` does not fit;
            the message has the numbers.
    """
    config = described.config
    model = described.model
    layout = described.layout
    if encoders.is_encoder(model):
        return _spec_of_encoder(described)
    max_length = model.max_position_embeddings
    check_length(config, model)
    check_batch_invariant(described)
    mixed = mixes(config, described.device)
    sharding = choose_sharding(described)
    described.drafting.check_sharding(sharding)
    weights_bytes = (
        # Each device has a whole drafter, and the plan divides the sum by their number.
        described.weights_bytes + described.drafting.num_bytes(layout.dtype) * sharding.num_devices
    )
    if described.vectors is not None:  # each device has the whole encoder
        weights_bytes += described.vectors.vision_bytes(layout.dtype) * sharding.num_devices
    if described.lora:
        weights_bytes += described.lora.num_bytes(layout.dtype) * sharding.num_shards
    kvs = (kv_of_shard(model.kv, sharding), *described.drafting.kvs)
    check_windows(config.speculative_config, config.model, kvs)
    check_recurrent(config.model, kvs[0], layout, kvs[1:])
    menu = step_menu(config, described.device, mixed=mixed, vectors=described.vectors)
    limits = step_limits(
        menu,
        config.max_num_seqs,
        mixed=mixed,
        adapts_num_steps=config.num_scheduler_steps == "auto",
    )
    check_whole(described.vectors, limits)
    groups = cache_groups(
        kvs,
        max_length=config.max_model_len or max_length,
        block_size=described.block_size,
        dtype=page_dtype(layout.kv_cache_dtype, layout.dtype),
        num_shards=sharding.num_local,
        interleaved=described.interleaves_pages,
    )
    memory = plan_memory(
        described, weights_bytes, groups, menu, max_row_length=limits.max_row_length, swaps=swaps
    )
    # The files of the prefix cache are moved by the executables that swap.
    if memory.num_host_blocks or config.prefix_cache_directory:
        menu = menu.swapping(memory.block_bytes)
    spec = EngineSpec(described, sharding, groups, menu, limits, memory)
    return replace(spec, attention=_attention_sets(spec))


def _attention_sets(spec: EngineSpec) -> str:
    described = spec.described
    if described.kernels is None:
        return ""
    return attention_sets(
        described.kernels,
        described.device.hardware,
        zip(spec.pages_of_shard, described.model.kv.sliding_windows, strict=True),
        spec.menu.buckets,
        described.model.num_query_heads // spec.sharding.num_shards,
        spec.layout.dtype,
    )


def _spec_of_encoder(described: Described) -> EngineSpec:
    """Returns the spec of an engine that only encodes; see `engine_spec_of`."""
    config = described.config
    encoders.check_settings(config, described.layout.tensor_parallel_size)
    check_length(config, described.model)
    sharding = make_sharding(described.model, 1, invariant=False)
    memory = encoders.plan_encoder_memory(described)
    return EngineSpec(
        described,
        sharding,
        encoders.NO_CACHE,
        BucketMenu((), ()),
        encoders.no_steps(config),
        memory,
        encoded=encoders.encoder_sizes(described),
    )


def check_length(config: EngineConfig, model: ModelSpec) -> None:
    """Raises ConfigError if the settings ask for more positions than the model has."""
    max_length = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > max_length:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model's positions end at "
            f"{max_length}"
            " (original_max_position_embeddings, where the model has LongRoPE; index_topk, "
            "where an indexer"
            " chooses the positions that are attended to: it is not computed)"
        )


def check_whole(vectors: VectorInput | None, limits: StepLimits) -> None:
    """Raises ConfigError if a step cannot hold tokens that see each other both ways."""
    if vectors is not None and vectors.num_whole > limits.max_tokens:
        raise ConfigError(
            f"max_num_batched_tokens is {limits.max_tokens}, but a picture of this model fills up "
            f"to {vectors.num_whole} tokens that see each other both ways, which one step "
            f"computes: set max_num_batched_tokens to {vectors.num_whole} or more, or limit_images "
            "to 0"
        )


def choose_sharding(described: Described) -> Sharding:
    """Returns how the model is divided.

    Raises:
        ConfigError: The devices cannot share the model.
    """
    requested = described.config.tensor_parallel_reduction
    num_devices = described.layout.tensor_parallel_size
    is_cpu = described.device.is_cpu
    batch_invariant = described.config.batch_invariant and not is_cpu
    invariant = requested == "invariant" or (
        requested == "auto"
        and (is_cpu or batch_invariant)
        and num_devices > 1
        and LOGICAL_SHARDS % num_devices == 0
    )
    if batch_invariant and num_devices > 1 and not invariant:
        raise ConfigError(
            f"batch_invariant with tensor_parallel_size {num_devices} and "
            f"tensor_parallel_reduction {requested!r}: devices would add up in an order that "
            "depends on the batch; use 'invariant', for 2 or 4 devices"
        )
    return make_sharding(described.model, num_devices, invariant=invariant)


def mixes(config: EngineConfig, device: DeviceSpec) -> bool:
    """Returns whether prompt chunks and decodes share a step.

    By default the kernel set decides. A GPU's kernel takes any rows in one launch. In plain XLA a
    step that mixes them pads every single token to a tile of queries.
    """
    if config.enable_mixed_steps is not None:
        return config.enable_mixed_steps
    return device.prefers_mixed_steps(config.attention_backend)


def step_menu(
    config: EngineConfig, device: DeviceSpec, *, mixed: bool, vectors: VectorInput | None = None
) -> BucketMenu:
    """Returns the shapes of an engine's steps.

    Args:
        config: The settings.
        device: The device.
        mixed: True if prompt chunks and decodes share a step; see `mixes`.
        vectors: What may take the place of tokens; None if nothing may.

    Raises:
        ConfigError: No shape has room for the drafts that the settings ask for.
    """
    drafts = config.speculative_config
    maximum = config.max_num_batched_tokens
    if maximum is None:
        maximum = BATCHED_TOKENS_ON_CPU if device.is_cpu else BATCHED_TOKENS_ON_ACCELERATORS
        maximum = max(maximum, vectors.num_whole if vectors else 0)
    # No step has fewer rows; see `buckets.MIN_ROWS`.
    maximum = max(maximum, 2)
    menu = make_menu(
        config.max_num_seqs,
        maximum,
        mixed=mixed,
        num_drafts=drafts.draft_lengths if drafts else (),
        max_verified_tokens=maximum,
        trees=drafts is not None and drafts.branches,
        q_width=MAX_CANDIDATES if config.acceptance.name == "rejection" else 0,
        num_steps=choose_num_steps(config, device),
        takes_vectors=vectors is not None,
    )
    if drafts is not None and not menu.verify:
        raise ConfigError(
            "speculative_config: the smallest step with drafts has "
            f"{1 + min(drafts.draft_lengths)} tokens; "
            f"max_num_batched_tokens is {maximum}"
        )
    return menu


def choose_num_steps(config: EngineConfig, device: DeviceSpec) -> int:
    """Returns how many decode steps one executable runs at most."""
    if config.num_scheduler_steps != "auto":
        return config.num_scheduler_steps
    if config.speculative_config is not None:
        return 1
    return STEPS_ON_CPU if device.is_cpu else STEPS_ON_ACCELERATORS


def step_limits(
    menu: BucketMenu, max_num_seqs: int, *, mixed: bool, adapts_num_steps: bool = False
) -> StepLimits:
    """Returns the limits of the shapes, for the scheduler."""
    num_steps = max((bucket.num_steps for bucket in menu.multi_step), default=1)
    return StepLimits(
        max_rows=max_num_seqs,
        max_tokens=menu.chunk[-1].num_tokens,
        max_chunk_rows=min(menu.max_chunk_rows, max_num_seqs),
        mixed=mixed,
        verified=tuple((bucket.num_rows, bucket.max_query_len) for bucket in menu.verify),
        trees=any(bucket.trees for bucket in menu.verify),
        decoded=tuple(bucket.num_rows for bucket in menu.decode),
        streams=tuple((bucket.num_rows, bucket.num_tokens) for bucket in menu.verify),
        num_steps=num_steps,
        adapts_num_steps=adapts_num_steps and num_steps > 1,
    )
