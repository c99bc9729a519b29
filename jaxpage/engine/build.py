"""From settings to an engine: find the model, check that it fits in memory, load it, compile every shape."""

from __future__ import annotations

import functools
import logging
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpage.checkpoints import eos_token_ids, load_weights, open_model, resolve_model
from jaxpage.checkpoints.opening import ModelFiles
from jaxpage.config import EngineConfig
from jaxpage.device import kv_pages
from jaxpage.device.buckets import BucketMenu, make_menu
from jaxpage.device.executables import Executables, use_compile_cache
from jaxpage.device.sizing import MemoryPlan, available_bytes, choose_num_blocks, gib
from jaxpage.device.steps import StepOptions
from jaxpage.engine.batch_builder import BatchBuilder
from jaxpage.engine.engine import Engine
from jaxpage.engine.event_log import EventLog, check_new
from jaxpage.engine.log_header import header
from jaxpage.engine.runner import Runner
from jaxpage.engine.sampling_defaults import read_sampling_defaults
from jaxpage.engine.text import load_tokenizer
from jaxpage.errors import CapacityError, CheckpointError, ConfigError
from jaxpage.memory import BlockManager, BlockPool, PrefixIndex
from jaxpage.models.base import abstract_model
from jaxpage.scheduling import Scheduler, StepLimits

logger = logging.getLogger(__name__)

BATCHED_TOKENS_ON_CPU = 256  # keep a CPU busy
BATCHED_TOKENS_ON_ACCELERATORS = 2048


@dataclass(frozen=True)
class Built:
    """An engine and what the front doors need to know about its model."""

    engine: Engine
    tokenizer: Any | None
    sampling_defaults: dict[str, Any]  # of SamplingParams, from generation_config.json
    memory: MemoryPlan


def build_engine(config: EngineConfig, *, progress: bool) -> Built:
    """Raises ModelNotFoundError, CheckpointError, UnsupportedError or CapacityError before the device holds anything."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:  # what a program has set stands
        use_compile_cache(compile_cache_directory())
    if config.event_log is not None:
        check_new(config.event_log)
    files = open_model(resolve_model(config.model, config.revision))
    _check_load_format(config, files)
    tokenizer = _tokenizer(config, files)
    sampling_defaults = read_sampling_defaults(files.directory)
    device = jax.devices()[0]
    dtype = _dtype(config, files, device)
    menu = make_menu(config.max_num_seqs, _max_num_batched_tokens(config, device))
    memory = _plan_memory(config, files, device, dtype, menu)
    if progress:
        _print_table(memory, dtype)
    parameters = load_weights(files.plan, dtype, functools.partial(jax.device_put, device=device), progress=progress)
    graph, _ = abstract_model(files.family, files.spec, jnp.dtype(dtype))
    table_width = -(-memory.max_model_len // config.block_size)
    options = StepOptions(graph, table_width, config.attention_backend, sample_by_row=device.platform == "cpu")
    pages = kv_pages.page_shapes(files.spec.kv, memory.num_blocks, config.block_size, jnp.dtype(dtype))
    executables = Executables(menu, parameters, pages, options, progress=progress)
    new_pages = functools.partial(
        kv_pages.allocate, files.spec.kv, memory.num_blocks, config.block_size, jnp.dtype(dtype)
    )
    engine = Engine(
        scheduler=_scheduler(config, menu, memory),
        builder=BatchBuilder(
            menu,
            table_width=table_width,
            block_size=config.block_size,
            num_blocks=memory.num_blocks,
            vocab_size=files.spec.vocab_size,
        ),
        runner=Runner(parameters, new_pages, executables),
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(files),
        max_model_len=memory.max_model_len,
        seed=config.seed,
    )
    memory = replace(memory, workspace_bytes=executables.workspace_bytes())
    if config.event_log is not None:
        engine.events = EventLog(config.event_log, header(config, engine, memory))
    if progress:
        print(f"  workspace of the compiled steps  {gib(memory.workspace_bytes)}", file=sys.stderr)
    return Built(engine, tokenizer, sampling_defaults, memory)


def compile_cache_directory() -> Path:
    """$JAX_COMPILATION_CACHE_DIR, else a directory of the user's own, per version and platform, below $JAXPAGE_CACHE_DIR."""
    if chosen := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(chosen)
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("JAXPAGE_CACHE_DIR") or user_cache / "jaxpage")
    return home / "xla" / f"{jax.__version__}-{jax.default_backend()}"


def _check_load_format(config: EngineConfig, files: ModelFiles) -> None:
    if config.load_format not in ("auto", files.plan.layout):
        raise ConfigError(f"load_format is {config.load_format!r}, but {files.directory} holds {files.plan.layout}")


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


def _dtype(config: EngineConfig, files: ModelFiles, device: jax.Device) -> str:
    """ "auto" follows the checkpoint, but on CPU everything runs in float32, where XLA's bfloat16 products are many times slower."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device.platform == "cpu" else files.plan.stored_dtype()


def _max_num_batched_tokens(config: EngineConfig, device: jax.Device) -> int:
    if config.max_num_batched_tokens is not None:
        return max(config.max_num_batched_tokens, 2)
    return BATCHED_TOKENS_ON_CPU if device.platform == "cpu" else BATCHED_TOKENS_ON_ACCELERATORS


def _plan_memory(
    config: EngineConfig, files: ModelFiles, device: jax.Device, dtype: str, menu: BucketMenu
) -> MemoryPlan:
    spec = files.spec
    longest = spec.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len is {config.max_model_len}, but the model's positions end at {longest}")
    plan = MemoryPlan(
        device=f"{device.platform} ({device.device_kind})",
        available_bytes=available_bytes(device, config.gpu_memory_utilization),
        weights_bytes=files.plan.num_bytes(dtype),
        workspace_bytes=_workspace_estimate(spec.vocab_size, spec.model_width, menu),
        block_bytes=kv_pages.bytes_per_block(spec.kv, config.block_size, jnp.dtype(dtype)),
        block_size=config.block_size,
        num_blocks=0,
        max_model_len=config.max_model_len or longest,
    )
    plan = choose_num_blocks(
        plan, wanted=config.num_blocks, pool_bytes=config.kv_cache_memory_bytes, max_num_seqs=config.max_num_seqs
    )
    if plan.num_slots >= plan.max_model_len:
        return plan
    if config.max_model_len is not None:
        raise CapacityError(
            f"One sequence of max_model_len = {plan.max_model_len} tokens does not fit in the KV pool of {plan.num_slots} slots "
            f"({plan.num_blocks - 1} blocks of {plan.block_size}). Lower max_model_len to {plan.num_slots} or less, or raise "
            "num_blocks or kv_cache_memory_bytes."
        )
    return replace(plan, max_model_len=plan.num_slots)


def _workspace_estimate(vocab_size: int, width: int, menu: BucketMenu) -> int:
    """Before compilation: logits with what sampling makes of them, and a dozen activations of the widest step, in float32."""
    rows = max(bucket.num_rows for bucket in menu.buckets)
    tokens = max(bucket.num_tokens for bucket in menu.buckets)
    return 4 * (6 * rows * vocab_size + 24 * tokens * width)


def _scheduler(config: EngineConfig, menu: BucketMenu, memory: MemoryPlan) -> Scheduler:
    limits = StepLimits(
        max_rows=config.max_num_seqs,
        max_tokens=menu.chunk[-1].num_tokens,
        max_chunk_rows=min(menu.max_chunk_rows, config.max_num_seqs),
        mixed=False,  # attention in plain XLA pads every row to a tile: prompt chunks and single tokens are better apart
    )
    prefix_index = PrefixIndex(config.block_size) if config.enable_prefix_caching else None
    manager = BlockManager(BlockPool(memory.num_blocks), config.block_size, prefix_index)
    return Scheduler(limits, manager, max_num_seqs=config.max_num_seqs)


def _print_table(memory: MemoryPlan, dtype: str) -> None:
    rows = [*memory.rows(), ("dtype", dtype)]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}", file=sys.stderr)
