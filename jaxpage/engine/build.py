"""From settings to an engine: find the model, check that it fits in memory, load it, compile every shape."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpage.checkpoints import eos_token_ids, load_weights, open_model, resolve_model
from jaxpage.checkpoints.opening import ModelFiles
from jaxpage.device import kv_pages
from jaxpage.device.backends import Backend, choose_backend
from jaxpage.device.buckets import BucketMenu
from jaxpage.device.drafter import DeviceDrafter
from jaxpage.device.executables import Executables, use_compile_cache
from jaxpage.device.host_pages import HostPages
from jaxpage.device.sizing import MemoryPlan, gib
from jaxpage.device.steps import StepOptions
from jaxpage.engine.batch_builder import BatchBuilder
from jaxpage.engine.capacity import (
    Form,
    Place,
    choose_dtype,
    mixes,
    notices,
    place_of,
    plan_memory,
    plan_swapping,
    sliding_window,
    step_menu,
)
from jaxpage.engine.drafters import Target
from jaxpage.engine.drafting import Drafting, open_drafting
from jaxpage.engine.engine import Engine, EngineParts
from jaxpage.engine.runner import Runner
from jaxpage.engine.sampling_defaults import read_sampling_defaults
from jaxpage.engine.step_costs import measure_costs
from jaxpage.engine.text import load_tokenizer
from jaxpage.errors import CheckpointError, ConfigError, UnsupportedError
from jaxpage.memory import BlockManager, BlockPool, PrefixIndex
from jaxpage.models.base import KVSpec, abstract_model
from jaxpage.scheduling import POLICIES, Preemption, Scheduler
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.step.limits import StepLimits
from jaxpage.step.strategy import Strategy
from jaxpage.tables import aligned

logger = logging.getLogger(__name__)

PHASES = ("finding the model", "planning the memory", "loading the weights", "compiling the steps")


@dataclass(frozen=True)
class Built:
    """An engine and what the front doors need to know about its model."""

    engine: Engine
    tokenizer: Any | None
    sampling_defaults: dict[str, Any]  # of SamplingParams, from generation_config.json
    memory: MemoryPlan


def build_engine(
    config: EngineConfig,
    *,
    progress: bool,
    verbose: bool | None = None,
    phase: Callable[[str], None] = lambda name: None,
    parts: EngineParts | None = None,
) -> Built:
    """Raises ModelNotFoundError, CheckpointError, UnsupportedError or CapacityError before the device holds anything.

    progress: bars on standard error. verbose: the memory's table, and what the compile cache had; None: as `progress`. phase: is told
    what begins, one of PHASES. parts: of the engine, in place of its own.
    """
    phase(PHASES[0])
    files = _opened(config)
    tokenizer = _tokenizer(config, files)
    sampling_defaults = read_sampling_defaults(files.directory)
    phase(PHASES[1])
    device = jax.devices()[0]
    place = place_of(device, config.gpu_memory_utilization)
    dtype = choose_dtype(config, place, files.plan.stored_dtype())
    drafting = open_drafting(config.speculative_config, files)
    memory = _memory_plan(config, files, place, dtype, drafting)
    backend = choose_backend(config.attention_backend, device, config.kv_cache_dtype)
    if backend.interpret:
        logger.warning("attention_backend %r is interpreted on CPU: for tests, many times slower", backend.name)
    for notice in notices(config, place, files.spec, memory):
        logger.warning(notice)
    menu = step_menu(config, place, memory)
    if verbose := progress if verbose is None else verbose:
        _print_table(memory, dtype, config.kv_cache_dtype)
    phase(PHASES[2])
    put = functools.partial(jax.device_put, device=device)
    weights = load_weights(files.plan, dtype, put, progress=progress)
    parameters = {"target": weights, "drafter": drafting.load(dtype, put, progress=progress)}
    table_width = -(-memory.max_model_len // config.block_size)
    drafter = drafting.make(Target(dtype, files.spec.vocab_size, menu, memory.num_blocks, config.acceptance.name))
    options = _step_options(files, dtype, table_width, config, backend, drafter, by_row=place.is_cpu)
    pool = (memory.num_blocks, config.block_size, kv_pages.page_dtype(config.kv_cache_dtype, dtype))
    pages = kv_pages.page_shapes(files.spec.kv, *pool) + drafting.pages(menu, *pool)
    phase(PHASES[3])
    both_ways = drafting.may_be_off
    executables = _compiled(config, menu, parameters, pages, options, target_only=both_ways, progress=progress)
    scheduler = _scheduler(config, place, menu, memory, (files.spec.kv, *drafting.kvs))
    strategies: dict[int, Strategy] = {}
    speculator = drafting.speculator(scheduler.limits, menu, files.spec.vocab_size, config.block_size, strategies)
    chosen: EngineParts = {"speculator": speculator, **(parts or {})}
    engine = Engine(
        scheduler=scheduler,
        builder=_builder(menu, memory, table_width, files.spec.vocab_size),
        runner=Runner(
            parameters,
            functools.partial(kv_pages.allocate, pages),
            executables,
            HostPages(memory.num_host_blocks, memory.block_bytes),
        ),
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(files),
        max_model_len=memory.max_model_len,
        seed=config.seed,
        strategies=strategies,
        **chosen,
    )
    if (controller := getattr(engine.speculator, "controller", None)) is not None:
        measure_costs(engine.builder, engine.runner, controller)
    scratch_bytes = kv_pages.num_bytes(pages) - memory.pool_bytes
    memory = replace(memory, workspace_bytes=executables.workspace_bytes() + scratch_bytes)
    if verbose:
        _print_compiled(memory, executables)
    return Built(engine, tokenizer, sampling_defaults, memory)


def _memory_plan(config: EngineConfig, files: ModelFiles, place: Place, dtype: str, drafting: Drafting) -> MemoryPlan:
    weights_bytes, form = files.plan.num_bytes(dtype) + drafting.num_bytes(dtype), Form(dtype, config.kv_cache_dtype)
    return plan_swapping(config, plan_memory(config, files.spec, place, form, weights_bytes, drafting))


def _builder(menu: BucketMenu, memory: MemoryPlan, table_width: int, vocab_size: int) -> BatchBuilder:
    return BatchBuilder(
        menu,
        table_width=table_width,
        block_size=memory.block_size,
        num_blocks=memory.num_blocks,
        vocab_size=vocab_size,
        num_host_blocks=memory.num_host_blocks,
    )


def _step_options(
    files: ModelFiles,
    dtype: str,
    table_width: int,
    config: EngineConfig,
    backend: Backend,
    drafter: DeviceDrafter | None,
    *,
    by_row: bool,
) -> StepOptions:
    graph, _ = abstract_model(files.family, files.spec, jnp.dtype(dtype))
    return StepOptions(
        graph,
        files.spec.vocab_size,
        table_width * config.block_size,
        table_width,
        backend,
        sample_by_row=by_row,
        drafter=drafter,
        acceptance=config.acceptance,
    )


def compile_cache_directory() -> Path:
    """$JAX_COMPILATION_CACHE_DIR, else a directory of the user's own, per version and platform, below $JAXPAGE_CACHE_DIR."""
    if chosen := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(chosen)
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("JAXPAGE_CACHE_DIR") or user_cache / "jaxpage")
    return home / "xla" / f"{jax.__version__}-{jax.default_backend()}"


def _opened(config: EngineConfig) -> ModelFiles:
    """The model's files, after everything that can be refused before they are read."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:  # what a program has set stands
        use_compile_cache(compile_cache_directory())
    files = open_model(resolve_model(config.model, config.revision))
    if config.load_format not in ("auto", files.plan.layout):
        raise ConfigError(f"load_format is {config.load_format!r}, but {files.directory} holds {files.plan.layout}")
    return files


def _compiled(config: EngineConfig, *shapes: Any, target_only: bool, progress: bool) -> Executables:
    try:
        return Executables(*shapes, target_only=target_only, progress=progress)
    except NotImplementedError as refusal:  # every backend's reason
        raise UnsupportedError(f"attention_backend {config.attention_backend!r}: {refusal}") from refusal


def _tokenizer(config: EngineConfig, files: ModelFiles) -> Any | None:
    """Raises ModelNotFoundError or CheckpointError if a tokenizer was asked for and is not there, or does not fit the model."""
    directory = resolve_model(config.tokenizer) if config.tokenizer else files.directory
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        if config.tokenizer:
            raise CheckpointError(f"tokenizer = {config.tokenizer!r}: there are no tokenizer files in {directory}")
        return None
    last = files.spec.vocab_size - 1
    largest = max(tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False).values(), default=0)
    if largest > last:
        raise CheckpointError(f"{directory}: the tokenizer has token id {largest}, but the model's ids end at {last}")
    if added := [token for token, token_id in tokenizer.get_vocab().items() if token_id > last]:
        # Published models have such: special tokens that nobody trained. A prompt that uses one is refused.
        logger.warning("the tokenizer's added tokens %s lie beyond the model's ids, which end at %d", added, last)
    return tokenizer


def _eos_token_ids(files: ModelFiles) -> frozenset[int]:
    token_ids = eos_token_ids(files.directory, files.config)
    beyond = {token_id for token_id in token_ids if token_id >= files.spec.vocab_size}
    if beyond:
        logger.warning(
            "eos_token_id %s can never be drawn: the model's ids end at %d", beyond, files.spec.vocab_size - 1
        )
    return token_ids - beyond


def _scheduler(
    config: EngineConfig, place: Place, menu: BucketMenu, memory: MemoryPlan, kvs: tuple[KVSpec, ...]
) -> Scheduler:
    limits = StepLimits(
        max_rows=config.max_num_seqs,
        max_tokens=menu.chunk[-1].num_tokens,
        max_chunk_rows=min(menu.max_chunk_rows, config.max_num_seqs),
        mixed=mixes(config, place),
        verified=tuple((bucket.num_rows, bucket.max_query_len) for bucket in menu.verify),
        trees=any(bucket.trees for bucket in menu.verify),
        decoded=tuple(bucket.num_rows for bucket in menu.decode),
        streams=tuple((bucket.num_rows, bucket.num_tokens) for bucket in menu.verify),
    )
    manager = BlockManager(
        BlockPool(memory.num_blocks),
        config.block_size,
        PrefixIndex(config.block_size) if config.enable_prefix_caching else None,
        host_pool=BlockPool(memory.num_host_blocks + 1) if memory.num_host_blocks else None,
        sliding_window=sliding_window(kvs, memory.max_model_len),
    )
    return Scheduler(
        limits,
        manager,
        max_num_seqs=config.max_num_seqs,
        queue=POLICIES[config.scheduling_policy](),
        preemption=Preemption(config.preemption_mode, config.new_requests_wait_until),
    )


def _print_compiled(memory: MemoryPlan, executables: Executables) -> None:
    total, found = executables.compile_total, executables.num_found
    found_text = f"all {total}" if found == total else f"{found} of {total}"
    print(
        f"  {found_text} executables were in the compile cache; workspace of the steps: {gib(memory.workspace_bytes)}",
        file=sys.stderr,
    )


def _print_table(memory: MemoryPlan, dtype: str, kv_cache_dtype: str) -> None:
    kv_dtype = dtype if kv_cache_dtype == "auto" else f"{kv_cache_dtype}, a float32 scale per token and head"
    rows = [*memory.rows(), ("dtype", dtype), ("KV dtype", kv_dtype)]
    for line in aligned(rows, num_words=2):
        print(f"  {line}", file=sys.stderr)
