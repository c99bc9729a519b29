"""From settings to an engine: find the model, check that it fits in memory, load it, compile every shape."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxpage.assembly.capacity import (
    ModelLayout,
    choose_dtype,
    choose_kv_cache_dtype,
    device_spec_of,
    dtype_reason,
    notices,
)
from jaxpage.assembly.drafters import Target
from jaxpage.assembly.drafting import Drafting, open_drafting
from jaxpage.assembly.engine_spec import EngineSpec, describe_engine
from jaxpage.assembly.host_parts import make_builder, make_scheduler
from jaxpage.assembly.sampling_defaults import read_sampling_defaults
from jaxpage.assembly.step_costs import measure_costs
from jaxpage.checkpoints import load_shards, load_weights, open_model, resolve_model, resolve_tokenizer
from jaxpage.checkpoints.loading import insert
from jaxpage.checkpoints.opening import ModelFiles
from jaxpage.checkpoints.problems import listed
from jaxpage.checkpoints.tokenizer_files import ends_of_text, load_tokenizer
from jaxpage.device import kv_pages
from jaxpage.device.backends import Backend, attention_sets, choose_backend
from jaxpage.device.embedder import Embedder
from jaxpage.device.executables import Executables, check_graphs, use_compile_cache
from jaxpage.device.gpu_memory import open_devices
from jaxpage.device.host_pages import HostPages
from jaxpage.device.kv_pages import KVPages
from jaxpage.device.mesh import DeviceMesh, make_mesh
from jaxpage.device.sizing import MemoryPlan, gib
from jaxpage.device.steps import StepOptions
from jaxpage.device.stored_executables import compile_cache_directory, stored_executables
from jaxpage.engine.adapters import Adapters, lora_spec
from jaxpage.engine.engine import Engine, EngineParts
from jaxpage.engine.runner import Runner
from jaxpage.errors import CheckpointError, ConfigError, UnsupportedError
from jaxpage.models.base import abstract_model
from jaxpage.models.lora import LoRASpec, adapter_weights
from jaxpage.models.sharding import ShardedWeight, joined, kv_of_shard, sharded_weights, with_sharding
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.step.strategy import Strategy
from jaxpage.tables import aligned

logger = logging.getLogger(__name__)

PHASES = (
    "finding the model",
    "loading the kernels",
    "planning the memory",
    "loading the weights",
    "compiling the steps",
)


@dataclass(frozen=True)
class Built:
    """An engine and what the front doors need to know about its model."""

    engine: Engine
    tokenizer: Any | None
    sampling_defaults: dict[str, Any]  # of SamplingParams, from generation_config.json
    spec: EngineSpec
    model: ModelFiles

    @property
    def memory(self) -> MemoryPlan:
        return self.spec.memory

    def new_embedder(self) -> Embedder:
        """It has compiled nothing yet."""
        runner = self.engine.runner
        options, weights = runner.executables.options, runner.parameters["target"]
        kv, mesh = self.model.spec.kv, make_mesh(self.spec.layout.tensor_parallel_size)
        return Embedder(options, weights, kv, self.memory.block_size, self.spec.page_dtype, mesh)


def build_engine(
    config: EngineConfig,
    *,
    progress: bool,
    verbose: bool | None = None,
    phase: Callable[[str], None] = lambda name: None,
    planned: Callable[[EngineSpec], Mapping[str, int]] = lambda spec: {},
    before_steps: Callable[[EngineSpec], None] = lambda spec: None,
    parts: EngineParts | None = None,
    files: ModelFiles | None = None,
    tokenizer: Any | None = None,
) -> Built:
    """Raises ModelNotFoundError, CheckpointError, UnsupportedError or CapacityError before the device holds anything.

    progress: bars on standard error. verbose: the memory's table, and what the compile cache had; None: as `progress`. phase: called
    with each of PHASES. planned: called before anything is loaded; gives settings to plan with again. before_steps: called before any
    step, some of which are measured. parts, files, tokenizer: in place of the engine's own; with files the tokenizer may be None.
    """
    open_devices(config.gpu_memory_utilization)  # before anything else asks JAX for them
    phase(PHASES[0])
    _use_compile_cache()
    files = opened_files(config) if files is None else files
    tokenizer = _tokenizer(config, files) if tokenizer is None else tokenizer
    sampling_defaults = read_sampling_defaults(files.directory)
    phase(PHASES[1])
    mesh = make_mesh(config.tensor_parallel_size)
    cache_dtype = choose_kv_cache_dtype(config, files.spec, files.quantization)
    kernels = choose_backend(config.attention_backend, mesh.first, cache_dtype)
    phase(PHASES[2])
    drafting = open_drafting(config.speculative_config, files)
    lora = lora_spec(config, files.family, files.spec)
    spec = _describe(config, files, mesh, drafting, lora, kernels, cache_dtype, planned)
    if verbose := progress if verbose is None else verbose:
        _print(aligned([*spec.rows()], num_words=2))
    phase(PHASES[3])
    adapters = adapter_weights(files.family, files.spec, lora, files.rule, spec.sharding) if lora else []
    weights = load_model(files, spec, mesh, adapters, progress=progress)
    parameters = {"target": weights, "drafter": drafting.load(spec.layout.dtype, mesh.put, progress=progress)}
    phase(PHASES[4])
    pages = _pages(spec, files, drafting, mesh)
    options = _step_options(spec, config, files, drafting, lora, by_row=mesh.first.platform == "cpu")
    shapes = (spec.menu, parameters, pages, options)
    executables = _compiled(
        config, *shapes, target_only=drafting.may_be_off, mesh=mesh, stored=stored_executables(mesh), progress=progress
    )
    strategies: dict[int, Strategy] = {}
    speculator = drafting.speculator(spec.limits, spec.menu, spec.vocab_size, config.block_size, strategies)
    chosen: EngineParts = {"speculator": speculator, **(parts or {})}
    new_pages, host_pages = functools.partial(mesh.zeros, pages), _host_pages(spec, mesh, config)
    runner = Runner(parameters, new_pages, executables, host_pages, adapters)
    engine = Engine(
        scheduler=make_scheduler(config, spec),
        builder=make_builder(spec, lora.num_slots if lora else 0),
        runner=runner,
        tokenizer=tokenizer,
        eos_token_ids=ends_of_text(files, tokenizer),
        max_model_len=spec.memory.max_model_len,
        seed=config.seed,
        adapters=Adapters(lora, runner.write_adapter) if lora else None,
        strategies=strategies,
        **chosen,
    )
    before_steps(spec)
    if (controller := getattr(engine.speculator, "controller", None)) is not None:
        measure_costs(engine.builder, engine.runner, controller)
    scratch_bytes = mesh.num_bytes_of_device(pages) - spec.memory.pool_bytes
    memory = replace(spec.memory, workspace_bytes=executables.workspace_bytes() + scratch_bytes)
    if verbose:
        _print([_of_cache(memory, executables)])
    return Built(engine, tokenizer, sampling_defaults, replace(spec, memory=memory), files)


def _describe(
    config: EngineConfig,
    files: ModelFiles,
    mesh: DeviceMesh,
    drafting: Drafting,
    lora: LoRASpec | None,
    kernels: Backend,
    cache_dtype: str,
    planned: Callable[[EngineSpec], Mapping[str, int]],
) -> EngineSpec:
    """Logs the warnings of `notices`."""
    check_graphs(config.graphs, mesh.first.platform)
    if kernels.interpret:
        logger.warning("attention_backend %r is interpreted on CPU: for tests, many times slower", kernels.name)
    device = device_spec_of(mesh.first, config.gpu_memory_utilization, mesh.size)
    stored = files.plan.stored_dtype()
    layout = ModelLayout(choose_dtype(config, device, stored, files.family), cache_dtype, config.tensor_parallel_size)
    weights_bytes = files.plan.num_bytes(layout.dtype)

    def describe(config: EngineConfig) -> EngineSpec:
        return describe_engine(config, files.spec, device, layout, weights_bytes, drafting, lora, kernels=kernels)

    spec = describe(config)
    if sizes := planned(spec):
        spec = describe(config.replace(**sizes))
    num_heads = files.spec.num_query_heads // spec.sharding.num_shards
    layers = zip(_pages_of_shard(spec, files), files.spec.kv.sliding_windows, strict=True)
    attention = attention_sets(kernels, mesh.first, layers, spec.menu.buckets, num_heads, layout.dtype)
    described = files.quantization.described if files.quantization else ""
    spec = replace(spec, attention=attention, quantization=described, dtype_reason=dtype_reason(config, device, stored))
    if not_loaded := getattr(files.spec, "not_loaded", ""):
        logger.warning("%s are not supported, and not loaded: this is the text model alone", not_loaded)
    if files.quantization and cache_dtype == "auto" != files.quantization.kv_cache_dtype:
        text = "config.json asks for a KV cache in %s, which a model with recurrent layers cannot have: it stays in %s"
        logger.warning(text, files.quantization.kv_cache_dtype, layout.dtype)
    for notice in notices(config, device, files.spec, spec.memory):
        logger.warning(notice)
    return spec


def load_model(
    files: ModelFiles,
    spec: EngineSpec,
    mesh: DeviceMesh,
    adapters: Sequence[ShardedWeight] = (),
    *,
    progress: bool = False,
) -> dict[Any, Any]:
    """The weights of the checkpoint, each on the device that computes with it, and adapters that are zero."""
    dtype = spec.layout.dtype
    if spec.sharding.is_divided:
        divided = shards_of_weights(files, spec)
        weights = load_shards(files.plan, dtype, divided, mesh.put, mesh.put_shards, progress=progress)
    else:
        weights = load_weights(files.plan, dtype, mesh.put, progress=progress)
    places = [(place, weight.axis is not None) for weight in adapters for place in weight.places]
    arrays = mesh.zero_shards([(place.shape, is_divided) for place, is_divided in places], dtype)
    for (place, _), zeros in zip(places, arrays, strict=True):
        insert(weights, place.path, zeros)
    return weights


def whole_weights(files: ModelFiles, spec: EngineSpec, parameters: dict[Any, Any]) -> dict[Any, Any]:
    """The weights as the checkpoint has them."""
    return joined(shards_of_weights(files, spec), parameters) if spec.sharding.is_divided else parameters


def shards_of_weights(files: ModelFiles, spec: EngineSpec) -> list[ShardedWeight]:
    rule = with_sharding(spec.sharding, files.rule)
    _, shapes = abstract_model(files.family, files.spec, spec.layout.dtype, rule)
    return sharded_weights([filled.weight for filled in files.plan.parameters], shapes, spec.sharding)


def _pages_of_shard(spec: EngineSpec, files: ModelFiles) -> KVPages:
    """Shapes of all layers of the model, in one of its shards."""
    num_blocks = [spec.num_blocks[group] for group in spec.layer_groups[: files.spec.kv.num_layers]]
    kv = kv_of_shard(files.spec.kv, spec.sharding)
    return kv_pages.page_shapes(kv, num_blocks, spec.memory.block_size, spec.page_dtype)


def _pages(spec: EngineSpec, files: ModelFiles, drafting: Drafting, mesh: DeviceMesh) -> KVPages:
    """Shapes of all layers; of a divided model each layer's in each of a device's shards. Each device has all of a drafter's."""
    of_model = kv_pages.divided_shapes(_pages_of_shard(spec, files), spec.sharding.num_local, mesh)
    behind = [spec.num_blocks[group] for group in spec.layer_groups[files.spec.kv.num_layers :]]
    drafters: KVPages = mesh.whole(drafting.pages(spec.menu, behind, spec.memory.block_size, spec.page_dtype))
    return of_model + drafters


def _step_options(
    spec: EngineSpec,
    config: EngineConfig,
    files: ModelFiles,
    drafting: Drafting,
    lora: LoRASpec | None,
    *,
    by_row: bool,
) -> StepOptions:
    assert spec.kernels is not None, "the device is at hand"
    rule = with_sharding(spec.sharding, lora.rule(files.rule) if lora else files.rule)
    graph, _ = abstract_model(files.family, files.spec, spec.layout.dtype, rule)
    return StepOptions(
        graph,
        spec.vocab_size,
        spec.tables.width * spec.memory.block_size,
        spec.tables,
        _groups_of_pages(spec, files),
        spec.kernels,
        sample_by_row=by_row,
        drafter=drafting.make(
            Target(
                spec.layout.dtype,
                spec.vocab_size,
                spec.menu,
                spec.layer_groups,
                spec.num_blocks,
                config.acceptance.name,
                spec.sharding,
            )
        ),
        acceptance=config.acceptance,
        max_loras=lora.num_slots if lora else 0,
        sharding=spec.sharding,
        graphs=config.graphs,
    )


def _groups_of_pages(spec: EngineSpec, files: ModelFiles) -> tuple[int, ...]:
    """See `StepOptions.layer_groups`."""
    num_layers, groups = files.spec.kv.num_layers, spec.layer_groups
    of_model = (group for group in groups[:num_layers] for _ in range(spec.sharding.num_local))
    return (*of_model, *groups[num_layers:])


def _host_pages(spec: EngineSpec, mesh: DeviceMesh, config: EngineConfig) -> list[HostPages]:
    """Of this process's devices."""
    directory = config.prefix_cache_directory
    file_in = Path(directory) if directory and spec.memory.swaps_to_file else None
    try:
        return [
            HostPages(len(blocks), mesh.num_local * group.block_bytes, file_in)
            for group, blocks in zip(spec.groups, spec.host_blocks, strict=True)
        ]
    except OSError as error:
        raise ConfigError(f"prefix_cache_directory {directory!r} cannot take swapped blocks: {error}") from None


def _use_compile_cache() -> None:
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:  # what a program has set stands
        use_compile_cache(compile_cache_directory())


def opened_files(config: EngineConfig) -> ModelFiles:
    """The model's files, after everything that can be refused before they are read."""
    files = open_model(resolve_model(config.model, config.revision), config.quantization)
    if config.load_format not in ("auto", files.plan.layout):
        raise ConfigError(f"load_format is {config.load_format!r}, but {files.directory} holds {files.plan.layout}")
    if kinds := files.rounded_before:
        text = "quantization=%r rounds weights a second time that the file has in %s; quantization='gguf' keeps them as they are"
        logger.warning(text, config.quantization, ", ".join(kinds))
    return files


def _compiled(config: EngineConfig, *shapes: Any, **options: Any) -> Executables:
    try:
        return Executables(*shapes, **options)
    except NotImplementedError as refusal:  # every backend's reason
        raise UnsupportedError(f"attention_backend {config.attention_backend!r}: {refusal}") from refusal


def _tokenizer(config: EngineConfig, files: ModelFiles) -> Any | None:
    """Raises ModelNotFoundError or CheckpointError if a tokenizer was asked for and is not there, or does not fit the model."""
    directory = resolve_tokenizer(config.tokenizer) if config.tokenizer else files.directory
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
        # Published models have such: special tokens that were never trained. A prompt that uses one is refused.
        logger.warning(
            "the tokenizer's added tokens %s lie beyond the model's ids, which end at %d", listed(added), last
        )
    return tokenizer


def _of_cache(memory: MemoryPlan, executables: Executables) -> str:
    found, total = executables.found
    found_text = f"all {total}" if found == total else f"{found} of {total}"
    return f"{found_text} executables were in the compile cache; workspace of the steps: {gib(memory.workspace_bytes)}"


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"  {line}", file=sys.stderr)
