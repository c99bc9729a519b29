"""Replaces the weights of an engine, and returns them in the checkpoint's layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from jaxpage.assembly.compiling import (
    adapters_of,
    load_model,
    load_parameters,
    shards_of_weights,
    step_model,
)
from jaxpage.assembly.engine_spec import EngineSpec
from jaxpage.checkpoints import (
    LoadPlan,
    ModelFiles,
    Parameters,
    check_all_finite,
    with_parameters,
)
from jaxpage.device import make_mesh, pack_weights, to_device, unpacked_weights
from jaxpage.engine import Runner
from jaxpage.errors import UnsupportedError
from jaxpage.models import joined
from jaxpage.settings.argument_checks import check_choice

Mode = Literal["wait", "abort"]  # what happens to running requests


def checkpoint_parts(
    files: ModelFiles, spec: EngineSpec, parameters: Mapping[str, Any]
) -> Iterator[tuple[LoadPlan, Any]]:
    """Yields the weights of the model's checkpoint as it has them, and where each of them is.

    They are undivided and not in panels. A drafter in the checkpoint follows the model.

    Args:
        files: The model's files.
        spec: The engine's specification.
        parameters: The parameters of the steps: those of the model, and those of the drafter.
    """
    target = unpacked_weights(parameters["target"], step_model(files, spec)[1])
    if spec.sharding.is_divided:
        target = joined(shards_of_weights(files, spec), target)
    yield files.plan, target
    drafting = spec.described.drafting
    if plan := drafting.plan_in_model:
        yield plan, unpacked_weights(parameters["drafter"], drafting.packed(spec))


def check_replaceable(model: ModelFiles, event_log: str | None, name: str) -> None:
    """Checks that weights can be replaced.

    Args:
        model: The model's files.
        event_log: The path of the event log, if there is one.
        name: The name of the method that replaces them, for the message.

    Raises:
        UnsupportedError: The weights are quantised, or an event log is written.
    """
    if model.quantization is not None:
        raise UnsupportedError(
            f"{name} is not supported for quantised weights ({model.quantization.described})"
        )
    if event_log is not None:
        raise UnsupportedError(
            f"{name} is not supported with event_log: a log has one set of weights"
        )


def weights_on_device(files: ModelFiles, spec: EngineSpec, *, finite: bool) -> dict[str, Any]:
    """Loads weights for `Engine.replace_weights`; the device then holds the old ones, too.

    A drafter that is in the model's checkpoint is replaced with it.

    Args:
        files: The model's files, with the other weights.
        spec: The engine's specification.
        finite: True refuses NaN and infinite numbers.

    Raises:
        CheckpointError: The weights do not fit the model, or are not finite.
        UnsupportedError: The weights of the drafter cannot be read from these.
    """
    drafting = spec.described.drafting.with_weights_of(files)
    mesh = make_mesh(spec.layout.tensor_parallel_size)
    _, packed = step_model(files, spec)
    weights = {"target": load_model(files, spec, mesh, packed)}
    if drafting.plan_in_model:
        weights["drafter"] = drafting.load(spec.layout.dtype, mesh.put, progress=False)
        pack_weights(weights["drafter"], drafting.packed(spec))
    if finite:
        for plan, part in checkpoint_parts(files, spec, weights):
            check_all_finite(plan, part)
    return weights


def weights_for_waking(files: ModelFiles, spec: EngineSpec, runner: Runner) -> dict[str, Any]:
    """Returns the weights for `Engine.wake`: those that the runner kept, or the checkpoint's.

    Raises:
        CheckpointError: The checkpoint cannot be read again.
    """
    if runner.kept is not None:
        kept: dict[str, Any] = to_device(runner.kept)
        return kept
    mesh = make_mesh(spec.layout.tensor_parallel_size)
    _, packed = step_model(files, spec)
    return load_parameters(files, spec, mesh, packed, adapters_of(files, spec))


def given_weights(
    model: ModelFiles,
    spec: EngineSpec,
    event_log: str | None,
    parameters: Parameters,
    *,
    check_finite: bool,
    mode: Mode,
) -> Any:
    """Loads the weights that `update_parameters` is given; see `weights_on_device`.

    Args:
        model: The model's files.
        spec: The engine's specification.
        event_log: The path of the event log, if there is one.
        parameters: The weights.
        check_finite: True refuses NaN and infinite numbers.
        mode: The treatment of running requests; it is only checked here.

    Raises:
        ValueError: The mode is unknown.
        UnsupportedError: Weights cannot be replaced; see `check_replaceable`, `weights_on_device`.
        CheckpointError: The weights do not fit the model, or are not finite.
    """
    check_choice("mode", mode, get_args(Mode))
    check_replaceable(model, event_log, "update_parameters")
    return weights_on_device(with_parameters(model, parameters), spec, finite=check_finite)
