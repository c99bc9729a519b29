"""Loads the weights of a model onto the devices: its own, and others for an engine that was built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from jaxpage.assembly.engine_spec import EngineSpec
from jaxpage.checkpoints import (
    ModelFiles,
    Parameters,
    check_all_finite,
    load_shards,
    load_weights,
    with_parameters,
)
from jaxpage.checkpoints.loading import insert
from jaxpage.device.mesh import DeviceMesh, make_mesh
from jaxpage.errors import UnsupportedError
from jaxpage.models.base import abstract_model
from jaxpage.models.sharding import ShardedWeight, joined, sharded_weights, with_sharding
from jaxpage.settings.argument_checks import check_choice

Mode = Literal["wait", "abort"]  # what happens to requests that run


def load_model(
    files: ModelFiles,
    spec: EngineSpec,
    mesh: DeviceMesh,
    adapters: Sequence[ShardedWeight] = (),
    *,
    progress: bool = False,
) -> dict[Any, Any]:
    """Loads the weights, each onto the device that computes with it, and adapters that are zero."""
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
    """Returns the weights as the checkpoint has them."""
    return joined(shards_of_weights(files, spec), parameters) if spec.sharding.is_divided else parameters


def shards_of_weights(files: ModelFiles, spec: EngineSpec) -> list[ShardedWeight]:
    rule = with_sharding(spec.sharding, files.rule)
    _, shapes = abstract_model(files.family, files.spec, spec.layout.dtype, rule)
    return sharded_weights([filled.weight for filled in files.plan.parameters], shapes, spec.sharding)


def check_replaceable(model: ModelFiles, event_log: str | None, name: str) -> None:
    """Raises UnsupportedError where weights cannot be replaced. name: of what replaces them."""
    if model.quantization is not None:
        raise UnsupportedError(f"{name} is not supported for quantised weights ({model.quantization.described})")
    if event_log is not None:
        raise UnsupportedError(f"{name} is not supported with event_log: a log has one set of weights")


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
