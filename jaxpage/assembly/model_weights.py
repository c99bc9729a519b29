"""Replaces the weights of an engine, and returns them in the checkpoint's layout."""

from __future__ import annotations

from typing import Any, Literal, get_args

from jaxpage.assembly.compiling import (
    adapters_of,
    load_model,
    load_parameters,
    shards_of_weights,
)
from jaxpage.assembly.engine_spec import EngineSpec
from jaxpage.checkpoints import (
    ModelFiles,
    Parameters,
    check_all_finite,
    with_parameters,
)
from jaxpage.device.host_weights import to_device
from jaxpage.device.mesh import make_mesh
from jaxpage.engine import Runner
from jaxpage.errors import UnsupportedError
from jaxpage.models.sharding import joined
from jaxpage.settings.argument_checks import check_choice

Mode = Literal["wait", "abort"]  # what happens to running requests


def whole_weights(
    files: ModelFiles, spec: EngineSpec, parameters: dict[Any, Any]
) -> dict[Any, Any]:
    """Returns the weights undivided, as the checkpoint has them."""
    return (
        joined(shards_of_weights(files, spec), parameters)
        if spec.sharding.is_divided
        else parameters
    )


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


def weights_on_device(files: ModelFiles, spec: EngineSpec, *, finite: bool) -> Any:
    """Loads weights for `Engine.replace_weights`; the device then holds the old ones, too.

    Args:
        files: The model's files, with the other weights.
        spec: The engine's specification.
        finite: True refuses NaN and infinite numbers.

    Raises:
        CheckpointError: The weights do not fit the model, or are not finite.
    """
    weights = load_model(files, spec, make_mesh(spec.layout.tensor_parallel_size))
    if finite:
        check_all_finite(files, whole_weights(files, spec, weights))
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
    return load_parameters(files, spec, mesh, adapters_of(files, spec))


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
        UnsupportedError: Weights cannot be replaced; see `check_replaceable`.
        CheckpointError: The weights do not fit the model, or are not finite.
    """
    check_choice("mode", mode, get_args(Mode))
    check_replaceable(model, event_log, "update_parameters")
    return weights_on_device(with_parameters(model, parameters), spec, finite=check_finite)
