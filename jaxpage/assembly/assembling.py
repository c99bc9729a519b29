"""Puts the parts of an engine together: the fourth call of a start.

If speculation needs to know how long steps take, they are measured here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpage.assembly.compiling import Compiled
from jaxpage.assembly.describing import Opened
from jaxpage.assembly.hooks import Hooks
from jaxpage.assembly.pictures import open_pictures
from jaxpage.assembly.planning.encoders import max_stream_tokens
from jaxpage.assembly.planning.engine_spec import EngineSpec
from jaxpage.assembly.planning.sizing import MemoryPlan
from jaxpage.assembly.step_costs import describe_break_even, measure_costs
from jaxpage.checkpoints import ModelFiles, read_embedding_files
from jaxpage.checkpoints.tokenizers import ends_of_text
from jaxpage.device import AnyEmbedder, Embedder, Executables, TextEncoder
from jaxpage.device.hardware import DeviceMesh, make_mesh
from jaxpage.device.pages import HostPages
from jaxpage.engine import (
    Adapters,
    AdmissionRules,
    BatchBuilder,
    Engine,
    PictureEncoder,
    Runner,
    VectorSources,
)
from jaxpage.engine.texts import TextEmbedding
from jaxpage.errors import ConfigError
from jaxpage.memory import BlockManager, BlockPool, BlockTables, PrefixIndex
from jaxpage.models import EncoderConfig
from jaxpage.scheduling import POLICIES, Preemption, Scheduler
from jaxpage.settings.engine_config import EngineConfig
from jaxpage.settings.field_table import PARAMETERS
from jaxpage.step.strategy import Strategy
from jaxpage.tables import gib

if TYPE_CHECKING:
    from jaxpage.images import PictureProcessor


@dataclass(frozen=True)
class Built:
    """Holds an engine and what the front doors need to know about its model.

    Attributes:
        engine: The engine.
        tokenizer: The tokenizer; None if the model has none.
        sampling_defaults: The values of `SamplingParams` in the model's generation_config.json.
        spec: The decisions that the engine was made from.
        model: The model's files.
        checksum_of: Returns the hash of other weights, as they are on the device, for the event
            log; None where no log is written. It may take seconds, and any thread may call it.
    """

    engine: Engine
    tokenizer: Any | None
    sampling_defaults: dict[str, Any]
    spec: EngineSpec
    model: ModelFiles
    checksum_of: Callable[[Mapping[str, Any]], str | None] = lambda weights: None

    @property
    def memory(self) -> MemoryPlan:
        """Returns how the memory of a device is divided."""
        return self.spec.memory

    @property
    def max_model_len(self) -> int:
        """Returns the most tokens of a sequence, prompt and output together."""
        return self.memory.max_model_len

    @property
    def block_size(self) -> int:
        """Returns the slots of a KV block."""
        return self.memory.block_size

    @property
    def generates(self) -> bool:
        """Returns whether the model generates text; an encoder does not."""
        return not self.spec.encoded

    @functools.cached_property
    def embedding(self) -> TextEmbedding:
        """Returns how texts become vectors, as the model's files say."""
        files = read_embedding_files(self.model.directory)
        if isinstance(self.model.spec, EncoderConfig):
            files = files.of_encoder(self.model.config, scores_pairs=self.model.spec.scores_pairs)
        return TextEmbedding(files, self.tokenizer)

    @functools.cached_property
    def pictures(self) -> PictureProcessor | None:
        """Returns what processes the pictures of prompts; None if the model takes none."""
        if self.tokenizer is None or self.model.vision is None:
            return None
        return open_pictures(self.model.directory, self.model.config, self.tokenizer)

    def new_embedder(self) -> AnyEmbedder:
        """Returns an embedder of the model; one of a decoder has compiled nothing yet."""
        if isinstance(self.model.spec, EncoderConfig):
            max_tokens = max_stream_tokens(self.spec.described)
            return TextEncoder(
                self.model.spec, self.engine.executables, self.spec.encoded, max_tokens
            )
        weights = self.engine.parameters["target"]
        kv = self.model.spec.kv
        mesh = make_mesh(self.spec.layout.tensor_parallel_size)
        return Embedder(
            self.engine.executables, weights, kv, self.block_size, self.spec.page_dtype, mesh
        )


def assemble(opened: Opened, spec: EngineSpec, compiled: Compiled, hooks: Hooks) -> Built:
    """Puts an engine together.

    Raises:
        ConfigError: The prefix cache's directory cannot hold the file of the host's blocks.
    """
    files = opened.files
    tokenizer = opened.tokenizer
    mesh = opened.mesh
    lora = spec.described.lora
    strategies: dict[int, Strategy] = {}
    speculator = hooks.parts.speculator or spec.described.drafting.speculator(
        spec.limits,
        spec.menu,
        vocab_size=spec.vocab_size,
        block_size=spec.memory.block_size,
        strategies=strategies,
    )
    host_pages = _host_pages(spec, mesh)
    runner = Runner(
        compiled.parameters,
        compiled.executables.new_pages,
        compiled.executables,
        host_pages,
        compiled.adapters,
        compiled.packed,
    )
    # Weights that came from memory may be the caller's own arrays, which the engine must not
    # delete.
    if files.plan.may_alias:
        runner.share_parameters()
    engine = Engine(
        scheduler=_scheduler(spec),
        builder=_builder(spec),
        runner=runner,
        tokenizer=tokenizer,
        rules=AdmissionRules(
            spec.memory.max_model_len,
            ends_of_text(files, tokenizer),
            spec.config.seed,
            generates=not spec.encoded,
            refusals=_refusals(spec.config),
        ),
        adapters=Adapters(lora, runner.write_adapter) if lora else None,
        sources=_sources(spec, files, runner),
        parts=replace(hooks.parts, speculator=speculator, strategies=strategies),
    )
    if hooks.before_steps:
        hooks.before_steps(spec)
    if (controller := getattr(engine.speculator, "controller", None)) is not None:
        measure_costs(spec.menu, engine.builder, engine.runner, controller)
        decoded = [bucket.num_rows for bucket in spec.menu.decode]
        hooks.show([describe_break_even(controller, decoded)])
    if (workspace_bytes := compiled.executables.workspace_bytes()) is not None:
        # Pages beyond the pool are a drafter's scratch blocks, which the plan counts as workspace.
        workspace_bytes += mesh.num_bytes_of_device(compiled.pages) - spec.memory.pool_bytes
        spec = replace(spec, memory=replace(spec.memory, workspace_bytes=workspace_bytes))
        hooks.show([_of_cache(spec.memory, compiled.executables)])
    return Built(engine, tokenizer, opened.sampling_defaults, spec, files.drop_arrays())


def _refusals(config: EngineConfig) -> dict[str, str]:
    """Returns the reasons for which requests cannot ask for what the steps do not return."""
    return {
        field.name: f"needs {field.setting}=True"
        for field in PARAMETERS
        if field.setting and not getattr(config, field.setting)
    }


def _scheduler(spec: EngineSpec) -> Scheduler:
    """Returns a scheduler over new, empty block tables of all cache groups."""
    config = spec.config
    tables = [
        BlockTables(
            BlockPool(blocks.stop, first=blocks.start),
            spec.memory.block_size,
            host_pool=BlockPool(host_blocks.stop, first=host_blocks.start) if host_blocks else None,
            sliding_window=group.sliding_window,
            max_tokens=spec.limits.max_row_length,
        )
        for group, blocks, host_blocks in zip(
            spec.groups, spec.blocks, spec.host_blocks, strict=True
        )
    ]
    num_following = spec.described.drafting.num_following
    index = PrefixIndex(spec.memory.block_size, num_following=num_following)
    manager = BlockManager(tables, index if config.enable_prefix_caching else None)
    return Scheduler(
        spec.limits,
        manager,
        max_num_seqs=config.max_num_seqs,
        queue=POLICIES[config.scheduling_policy](),
        preemption=Preemption(config.preemption_mode, config.new_requests_wait_until),
        max_loras=config.max_loras if config.enable_lora else 0,
    )


def _builder(spec: EngineSpec) -> BatchBuilder:
    """Returns the builder that pads plans to the step shapes of this engine."""
    return BatchBuilder(
        spec.menu,
        table_width=spec.tables.width,
        block_size=spec.memory.block_size,
        blocks=spec.blocks,
        vocab_size=spec.vocab_size,
        tables=spec.tables,
        host_blocks=spec.host_blocks,
        max_loras=lora.num_slots if (lora := spec.described.lora) else 0,
        vectors=spec.vectors,
    )


def _sources(spec: EngineSpec, files: ModelFiles, runner: Runner) -> VectorSources | None:
    """Returns what keeps the vectors in prompts; None if prompts may have none."""
    if spec.vectors is None:
        return None
    encoder = None
    if (vision := files.vision) is not None:
        encoder = PictureEncoder(
            vision.family,
            vision.spec,
            runner.encode,
            max_pictures=spec.config.limit_images,
            cache_bytes=spec.config.encoder_cache_bytes,
        )
    return VectorSources(
        spec.vectors,
        takes_prompt_embeds=spec.config.enable_prompt_embeds,
        num_axes=spec.tables.num_axes,
        sees_ahead=spec.tables.sees_ahead,
        max_tokens=spec.limits.max_tokens,
        encoder=encoder,
    )


def _host_pages(spec: EngineSpec, mesh: DeviceMesh) -> list[HostPages]:
    """Returns the host's pages of each cache group, for the devices of this process."""
    directory = spec.config.prefix_cache_directory
    file_in = Path(directory) if directory and spec.memory.swaps_to_file else None
    try:
        return [
            HostPages(len(blocks), mesh.num_local * group.block_bytes, file_in)
            for group, blocks in zip(spec.groups, spec.host_blocks, strict=True)
        ]
    except OSError as error:
        raise ConfigError(
            f"prefix_cache_directory {directory!r} cannot take swapped blocks: {error}"
        ) from None


def _of_cache(memory: MemoryPlan, executables: Executables) -> str:
    num_found, total = executables.num_found_of_all
    found_text = f"all {total}" if num_found == total else f"{num_found} of {total}"
    return (
        f"{found_text} executables were in the compile cache; workspace of the steps: "
        f"{gib(memory.workspace_bytes)}"
    )
