"""Loads the weights and compiles every shape of the menu: the third call of a start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpage.assembly.describing import Opened
from jaxpage.assembly.engine_spec import EngineSpec
from jaxpage.assembly.hooks import PHASES, Hooks
from jaxpage.checkpoints import ModelFiles, insert, load_shards, load_weights
from jaxpage.device.executables import Executables
from jaxpage.device.kv_pages import KVPages
from jaxpage.device.mesh import DeviceMesh
from jaxpage.device.steps import StepOptions
from jaxpage.device.stored_executables import stored_executables
from jaxpage.errors import UnsupportedError
from jaxpage.models.base import abstract_model
from jaxpage.models.lora import adapter_weights
from jaxpage.models.sharding import ShardedWeight, sharded_weights, with_sharding


@dataclass(frozen=True)
class Compiled:
    """Holds what an engine has on its devices before its pages are made.

    Attributes:
        parameters: The weights of the model and of its drafter.
        adapters: A and B of every layer that takes LoRA adapters.
        pages: The shapes of the KV pages of all layers.
        executables: The table of compiled steps.
    """

    parameters: dict[str, Any]
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
    parameters = load_parameters(files, spec, mesh, adapters, progress=hooks.progress)
    hooks.phase(PHASES[4])
    options = _step_options(spec, files, by_row=mesh.first.platform == "cpu")
    pages = spec.pages(mesh)
    try:
        executables = Executables(
            spec.menu,
            parameters,
            pages,
            options,
            mesh=mesh,
            target_only=drafting.may_be_off,
            stored=stored_executables(mesh),
            progress=hooks.progress,
        )
    except NotImplementedError as refusal:  # the message has every backend's reason
        raise UnsupportedError(
            f"attention_backend {spec.config.attention_backend!r}: {refusal}"
        ) from refusal
    return Compiled(parameters, adapters, pages, executables)


def adapters_of(files: ModelFiles, spec: EngineSpec) -> list[ShardedWeight]:
    """Returns the LoRA weights A and B of every layer that takes adapters."""
    lora = spec.described.lora
    if not lora:
        return []
    return adapter_weights(files.family, files.spec, lora, files.rule, spec.sharding)


def load_parameters(
    files: ModelFiles,
    spec: EngineSpec,
    mesh: DeviceMesh,
    adapters: Sequence[ShardedWeight],
    *,
    progress: bool = False,
) -> dict[str, Any]:
    """Loads the weights of a model and of its drafter; see `load_model`."""
    drafting = spec.described.drafting
    return {
        "target": load_model(files, spec, mesh, adapters, progress=progress),
        "drafter": drafting.load(spec.layout.dtype, mesh.put, progress=progress),
    }


def load_model(
    files: ModelFiles,
    spec: EngineSpec,
    mesh: DeviceMesh,
    adapters: Sequence[ShardedWeight] = (),
    *,
    progress: bool = False,
) -> dict[Any, Any]:
    """Loads each weight onto its device, and adds LoRA adapters that are zero.

    Args:
        files: The model's files.
        spec: The engine's specification.
        mesh: The devices.
        adapters: The LoRA weights A and B of every layer that takes adapters.
        progress: True shows a bar.
    """
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
    return weights


def shards_of_weights(files: ModelFiles, spec: EngineSpec) -> list[ShardedWeight]:
    """Returns how each weight of the checkpoint is divided over the parameters of the model."""
    rule = with_sharding(spec.sharding, files.rule)
    _, shapes = abstract_model(files.family, files.spec, spec.layout.dtype, rule)
    return sharded_weights(
        [filled.weight for filled in files.plan.parameters], shapes, spec.sharding
    )


def _step_options(spec: EngineSpec, files: ModelFiles, *, by_row: bool) -> StepOptions:
    lora = spec.described.lora
    kernels = spec.described.kernels
    drafter = spec.described.drafting.drafter
    assert kernels is not None, "the device is at hand"
    rule = with_sharding(spec.sharding, lora.rule(files.rule) if lora else files.rule)
    graph, _ = abstract_model(files.family, files.spec, spec.layout.dtype, rule)
    return StepOptions(
        graph,
        spec.vocab_size,
        spec.tables.width * spec.memory.block_size,
        spec.tables,
        spec.page_groups,
        kernels,
        sample_by_row=by_row,
        drafter=drafter.make(spec) if drafter else None,
        acceptance=spec.config.acceptance,
        max_loras=lora.num_slots if lora else 0,
        sharding=spec.sharding,
        graphs=spec.config.graphs,
    )
