"""Loads other weights for an engine, or its own again, and gives weights a checkpoint's layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import jax

from jaxpage.assembly.compiling import adapters_of, load_parameters, shards_of_weights
from jaxpage.assembly.planning.engine_spec import EngineSpec
from jaxpage.checkpoints import LoadPlan, ModelFiles, in_memory
from jaxpage.device import Packings, to_device, unpack_weights
from jaxpage.engine import Runner, WakingWeights
from jaxpage.errors import UnsupportedError
from jaxpage.models.sharding import entry_at, join_weights
from jaxpage.settings.argument_checks import check_choice
from jaxpage.step.update import Mode


def checkpoint_parts(
    files: ModelFiles, spec: EngineSpec, packed: Packings, parameters: Mapping[str, Any]
) -> Iterator[tuple[LoadPlan, Any]]:
    """Yields the weights of the model's checkpoint as it has them, and where each of them is.

    They are undivided and not in panels. A drafter in the checkpoint and an
    encoder of pictures follow the model.

    Args:
        files: The model's files.
        spec: The engine's specification.
        packed: Which of the weights are in panels.
        parameters: The parameters of the steps: those of the model, and those of the drafter.
    """
    unpacked = unpack_weights(parameters, packed)
    target = unpacked["target"]
    if spec.sharding.is_divided:
        target = join_weights(shards_of_weights(files, spec), target)
    yield files.plan, target
    if plan := spec.described.drafting.plan_in_model:
        yield plan, unpacked["drafter"]
    if files.vision is not None:
        yield files.vision.plan, unpacked["vision"]


def check_replaceable(model: ModelFiles, name: str) -> None:
    """Checks that weights can be replaced.

    Args:
        model: The model's files.
        name: The name of the method that replaces them, for the message.

    Raises:
        UnsupportedError: The weights are quantised.
    """
    if model.quantization is not None:
        raise UnsupportedError(
            f"{name} is not supported for quantised weights ({model.quantization.described})"
        )


def weights_on_device(
    files: ModelFiles, spec: EngineSpec, packed: Packings, *, finite: bool
) -> dict[str, Any]:
    """Loads weights for `Engine.replace_weights`; the device then holds the old ones, too.

    A drafter that is in the model's checkpoint is replaced with it.

    Args:
        files: The model's files, with the other weights.
        spec: The engine's specification.
        packed: Which of the weights go into panels.
        finite: True refuses NaN and infinite numbers.

    Raises:
        CheckpointError: The weights do not fit the model, or are not finite.
        UnsupportedError: The weights of the drafter cannot be read from these.
    """
    drafting = spec.described.drafting.with_weights_of(files)
    in_model = drafting if drafting.plan_in_model else None
    weights = load_parameters(files, spec, packed, drafting=in_model)
    if finite:
        _check_finite(files, spec, packed, weights)
    return weights


def _check_finite(
    files: ModelFiles, spec: EngineSpec, packed: Packings, weights: Mapping[str, Any]
) -> None:
    """Checks the numbers that this process has; other hosts have the other parts of the model.

    Raises:
        CheckpointError: Some are NaN or infinite.
    """
    if not spec.sharding.is_divided:
        for plan, part in checkpoint_parts(files, spec, packed, weights):
            in_memory.check_all_finite(plan, part)
        return
    unpacked = unpack_weights(weights, packed)
    parts = {
        sharded.weight.path: [
            shard.data
            for place in sharded.places
            for shard in entry_at(unpacked["target"], place.path).addressable_shards
        ]
        for sharded in shards_of_weights(files, spec)
    }
    in_memory.check_finite_parts(files.plan, parts)
    further = {
        "drafter": spec.described.drafting.plan_in_model,
        "vision": None if files.vision is None else files.vision.plan,
    }
    for name, load_plan in further.items():
        if load_plan is not None:  # every device has all of it
            whole = jax.tree.map(lambda array: array.addressable_data(0), unpacked[name])
            in_memory.check_all_finite(load_plan, whole)


def weights_for_waking(files: ModelFiles, spec: EngineSpec, runner: Runner) -> WakingWeights:
    """Returns the weights for `Engine.wake`: those that the runner kept, or the checkpoint's.

    Raises:
        CheckpointError: The checkpoint cannot be read again.
    """
    # It is read before `host_parameters`, which may become those of a later sleep.
    num_sleeps = runner.num_sleeps
    host_weights = runner.host_parameters
    if host_weights is not None:
        return WakingWeights(to_device(host_weights), num_sleeps)
    adapters = adapters_of(files, spec)
    drafting = spec.described.drafting
    parameters = load_parameters(files, spec, runner.packed, adapters, drafting=drafting)
    return WakingWeights(parameters, num_sleeps)


def load_given_weights(
    model: ModelFiles,
    spec: EngineSpec,
    packed: Packings,
    parameters: in_memory.Parameters,
    *,
    check_finite: bool,
    mode: Mode,
) -> Any:
    """Loads the weights that `update_parameters` is given; see `weights_on_device`.

    Args:
        model: The model's files.
        spec: The engine's specification.
        packed: Which of the weights go into panels.
        parameters: The weights.
        check_finite: True refuses NaN and infinite numbers.
        mode: The treatment of running requests; it is only checked here.

    Raises:
        ValueError: The mode is unknown.
        UnsupportedError: Weights cannot be replaced; see `check_replaceable`, `weights_on_device`.
        CheckpointError: The weights do not fit the model, or are not finite.
    """
    check_choice("mode", mode, get_args(Mode))
    check_replaceable(model, "update_parameters")
    others = in_memory.with_parameters(model, parameters)
    return weights_on_device(others, spec, packed, finite=check_finite)
