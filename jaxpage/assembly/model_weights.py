"""Replaces the weights of an engine that was built, and gives them back as the checkpoint has them."""

from __future__ import annotations

from typing import Any, Literal, get_args

from jaxpage.assembly.compiling import load_model, shards_of_weights
from jaxpage.assembly.engine_spec import EngineSpec
from jaxpage.checkpoints import (
    ModelFiles,
    Parameters,
    check_all_finite,
    with_parameters,
)
from jaxpage.device.mesh import make_mesh
from jaxpage.errors import UnsupportedError
from jaxpage.models.sharding import joined
from jaxpage.settings.argument_checks import check_choice

Mode = Literal["wait", "abort"]  # what happens to requests that run


def whole_weights(
    files: ModelFiles, spec: EngineSpec, parameters: dict[Any, Any]
) -> dict[Any, Any]:
    """Returns the weights as the checkpoint has them."""
    return (
        joined(shards_of_weights(files, spec), parameters)
        if spec.sharding.is_divided
        else parameters
    )


def check_replaceable(model: ModelFiles, event_log: str | None, name: str) -> None:
    """Raises UnsupportedError where weights cannot be replaced. name: of what replaces them."""
    if model.quantization is not None:
        raise UnsupportedError(
            f"{name} is not supported for quantised weights ({model.quantization.described})"
        )
    if event_log is not None:
        raise UnsupportedError(
            f"{name} is not supported with event_log: a log has one set of weights"
        )


def weights_on_device(files: ModelFiles, spec: EngineSpec, *, finite: bool) -> Any:
    """Loads weights for `Engine.replace_weights`, while the old ones are on the device, too.

    finite: raises CheckpointError for NaN and infinite numbers.
    """
    weights = load_model(files, spec, make_mesh(spec.layout.tensor_parallel_size))
    if finite:
        check_all_finite(files, whole_weights(files, spec, weights))
    return weights


def given_weights(
    model: ModelFiles,
    spec: EngineSpec,
    event_log: str | None,
    parameters: Parameters,
    *,
    check_finite: bool,
    mode: Mode,
) -> Any:
    """Loads what `update_parameters` is given, and raises what that raises: see `weights_on_device`."""
    check_choice("mode", mode, get_args(Mode))
    check_replaceable(model, event_log, "update_parameters")
    return weights_on_device(with_parameters(model, parameters), spec, finite=check_finite)
