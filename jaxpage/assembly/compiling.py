"""Loads the weights and compiles every shape of the menu: the third call of a start."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpage.assembly.describing import Opened
from jaxpage.assembly.hooks import PHASES, Hooks
from jaxpage.assembly.planning.drafting import Drafting
from jaxpage.assembly.planning.engine_spec import EngineSpec
from jaxpage.checkpoints import ModelFiles, insert, load_shards, load_weights
from jaxpage.device import (
    Executables,
    Packings,
    StepOptions,
    encoder_jobs,
    open_stored_executables,
    pack_weights,
    routed_layers,
)
from jaxpage.device.hardware import make_mesh
from jaxpage.device.inputs import Bucket
from jaxpage.device.pages import KVPages
from jaxpage.device.vision import vision_jobs, vision_model, without_vision
from jaxpage.errors import UnsupportedError
from jaxpage.models import EncoderConfig, abstract, abstract_model, make_model
from jaxpage.models.parameters import adapter_weights
from jaxpage.models.sharding import ShardedWeight, shard_weights, with_sharding


@dataclass(frozen=True)
class Compiled:
    """Holds the weights and executables of an engine, before its pages are made.

    Attributes:
        parameters: The weights of the model and of its drafter.
        packed: Which of them are in panels, by their paths from "target", "drafter" or
            "vision".
        adapters: A and B of every layer that takes LoRA adapters.
        pages: The shapes of the KV pages of all layers.
        executables: The table of compiled steps.
    """

    parameters: dict[str, Any]
    packed: Packings
    adapters: Sequence[ShardedWeight]
    pages: KVPages
    executables: Executables


def compile_steps(opened: Opened, spec: EngineSpec, hooks: Hooks) -> Compiled:
    """Loads the weights and compiles the steps.

    Raises:
        UnsupportedError: No kernel set takes a step; the message has the reason of each.
    """
    files = opened.files
    mesh = opened.mesh
    drafting = spec.described.drafting
    hooks.phase(PHASES[3])
    adapters = adapters_of(files, spec)
    model, packed = _step_model(files, spec)
    parameters = load_parameters(
        files, spec, packed, adapters, drafting=drafting, progress=hooks.progress
    )
    hooks.phase(PHASES[4])
    options = _step_options(spec, model, by_row=mesh.first.platform == "cpu")
    pages = spec.pages(mesh)
    further: dict[Bucket | str, functools.partial[Any]] | None = None
    if isinstance(files.spec, EncoderConfig):
        further = encoder_jobs(
            spec.encoded, spec.memory.max_model_len, files.spec, parameters, options, mesh
        )
    if files.vision is not None:
        further = vision_jobs(
            files.vision.family,
            files.vision.spec,
            spec.layout.dtype,
            parameters,
            options.attention_backend,
            options.graphs,
            mesh,
            max_rows=spec.memory.max_model_len,
        )
    try:
        executables = Executables(
            spec.menu,
            without_vision(parameters),
            pages,
            options,
            mesh=mesh,
            target_only=drafting.may_be_off,
            stored=open_stored_executables(mesh),
            further=further,
            first=hooks.first,
            progress=hooks.progress,
        )
    except NotImplementedError as refusal:  # the message has every backend's reason
        hint = "; limit_images = 0 leaves pictures out" if spec.tables.sees_ahead else ""
        if spec.config.batch_invariant:
            hint += "; without batch_invariant more is computed"
        raise UnsupportedError(
            f"attention_backend {spec.config.attention_backend!r}: {refusal}{hint}"
        ) from refusal
    return Compiled(parameters, packed, adapters, pages, executables)


def adapters_of(files: ModelFiles, spec: EngineSpec) -> list[ShardedWeight]:
    """Returns the LoRA weights A and B of every layer that takes adapters."""
    lora = spec.described.lora
    if not lora:
        return []
    return adapter_weights(files.family, files.spec, lora, files.rule, spec.sharding)


def load_parameters(
    files: ModelFiles,
    spec: EngineSpec,
    packed: Packings,
    adapters: Sequence[ShardedWeight] = (),
    *,
    drafting: Drafting | None,
    progress: bool = False,
) -> dict[str, Any]:
    """Loads each weight onto its device, in panels where the kernels multiply by such.

    LoRA adapters that are zero are added.

    Args:
        files: The model's files.
        spec: The engine's specification.
        packed: Which of the weights go into panels; see `Compiled`.
        adapters: The LoRA weights A and B of every layer that takes adapters.
        drafting: The drafter; None loads the model alone.
        progress: True shows a bar.

    Returns:
        The model's weights under "target", those of the drafter under "drafter", and those of the
        encoder of pictures under "vision", if there is one.
    """
    mesh = make_mesh(spec.layout.tensor_parallel_size)
    dtype = spec.layout.dtype
    if spec.sharding.is_divided:
        divided = shards_of_weights(files, spec)
        weights = load_shards(
            files.plan, dtype, divided, mesh.put, mesh.put_shards, progress=progress
        )
    else:
        weights = load_weights(files.plan, dtype, mesh.put, progress=progress)
    places = [(place, weight.axis is not None) for weight in adapters for place in weight.places]
    arrays = mesh.zero_shards([(place.shape, is_divided) for place, is_divided in places], dtype)
    for (place, _), zeros in zip(places, arrays, strict=True):
        insert(weights, place.path, zeros)
    parameters: dict[str, Any] = {"target": weights}
    if drafting is not None:
        parameters["drafter"] = drafting.load(dtype, mesh.put, progress=progress)
    if files.vision is not None:
        parameters["vision"] = load_weights(files.vision.plan, dtype, mesh.put, progress=progress)
    pack_weights(parameters, packed, deletes=not files.plan.may_alias)
    return parameters


def _step_model(files: ModelFiles, spec: EngineSpec) -> tuple[nnx.Module, Packings]:
    """Returns the model that the steps compute, and which of all weights are in panels."""
    lora = spec.described.lora
    rule = with_sharding(spec.sharding, lora.rule(files.rule) if lora else files.rule)
    model: nnx.Module = make_model(files.family, files.spec, spec.layout.dtype, rule)
    drafted = spec.drafted
    parts = {
        "target": drafted.pack(model),
        "drafter": spec.described.drafting.find_packings(drafted),
    }
    kernels = spec.described.kernels
    if (vision := files.vision) is not None and kernels is not None:
        dtype = spec.layout.dtype
        parts["vision"] = vision_model(vision.family, vision.spec, dtype, kernels)[1]
    packed = {(key, *path): how for key, part in parts.items() for path, how in part.items()}
    return model, packed


def shards_of_weights(files: ModelFiles, spec: EngineSpec) -> list[ShardedWeight]:
    """Returns how each weight of the checkpoint is divided over the parameters of the model."""
    rule = with_sharding(spec.sharding, files.rule)
    _, shapes = abstract_model(files.family, files.spec, spec.layout.dtype, rule)
    return shard_weights([filled.weight for filled in files.plan.parameters], shapes, spec.sharding)


def _step_options(spec: EngineSpec, model: nnx.Module, *, by_row: bool) -> StepOptions:
    lora = spec.described.lora
    kernels = spec.described.kernels
    drafter = spec.described.drafting.drafter
    assert kernels is not None, "the device is at hand"
    routed = routed_layers(model) if spec.config.enable_return_routed_experts else None
    if routed is None and spec.config.enable_return_routed_experts:
        raise UnsupportedError(
            f"enable_return_routed_experts is not supported for {spec.config.model}: the model has "
            "no experts"
        )
    return StepOptions(
        abstract(model)[0],
        spec.vocab_size,
        spec.tables.width * spec.memory.block_size,
        spec.tables,
        spec.page_groups,
        kernels,
        sample_by_row=by_row,
        drafter=drafter.make(spec.drafted) if drafter else None,
        acceptance=spec.config.acceptance,
        max_loras=lora.num_slots if lora else 0,
        sharding=spec.sharding,
        graphs=spec.config.graphs,
        vectors=spec.vectors,
        returns_masks=spec.config.enable_return_sampling_mask,
        routed=routed,
        returns_hidden=spec.config.enable_return_hidden_states,
    )
