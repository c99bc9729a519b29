"""Fits weights that are in memory to a model, and returns weights by their names.

The names are those of Hugging Face, as in files; those of some trainers are turned into them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpage.checkpoints.config_file import check_sizes
from jaxpage.checkpoints.fitting import CODES, Filled, LoadPlan, fit_stored
from jaxpage.checkpoints.in_memory.trainer_names import hugging_face_names, trainer_of
from jaxpage.checkpoints.opening import ModelFiles, describe_config
from jaxpage.checkpoints.problems import Problems
from jaxpage.checkpoints.quantization import quantization_of
from jaxpage.checkpoints.safetensors_files import NUMPY_DTYPES
from jaxpage.checkpoints.safetensors_header import TensorInfo
from jaxpage.checkpoints.vision_files import VisionFiles, fit_vision
from jaxpage.errors import UnsupportedError
from jaxpage.layers.parameter import tensor
from jaxpage.models import find_ignored_tensors, model_weights
from jaxpage.models.config import text_part
from jaxpage.models.parameters import Path as LayerPath
from jaxpage.models.parameters import Weight
from jaxpage.models.sharding import entry_at

PLACE = Path("(parameters in memory)")  # Messages give this place.
Parameters = Mapping[str, Any] | nnx.Module


class HFConfig(Protocol):
    """A config of transformers, which can be turned into a dict."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of config.json."""


ModelConfig = Mapping[str, Any] | HFConfig
_CODES = {dtype: code for code, dtype in NUMPY_DTYPES.items()}


def open_parameters(
    config: ModelConfig,
    parameters: Parameters,
    quantization: str | None = None,
    *,
    may_alias: bool = False,
) -> ModelFiles:
    """Opens a model whose weights are arrays in memory.

    Args:
        config: A dict with the content of config.json, or a config of transformers.
        parameters: The arrays in a flat or a nested dict, or a module of the model's family or of
            Tunix.
        quantization: The setting.
        may_alias: See `LoadPlan`.

    Raises:
        CheckpointError: The weights do not fit; the error lists all that is wrong.
        TypeError: The config or the parameters are of another type.
    """
    if not isinstance(config, Mapping):
        if not hasattr(config, "to_dict"):
            raise TypeError(
                "config must be a dict, as config.json is, or a config of transformers; got "
                f"{config!r:.80}"
            )
        config = config.to_dict()
    problems = Problems(PLACE)
    config = text_part(config)
    check_sizes(config, problems)
    described = describe_config(config, lambda: quantization_of(config, quantization), problems)
    problems.raise_if_any()
    assert described is not None
    if (scheme := described.quantization) is not None and isinstance(parameters, Mapping):
        of_codes = [NUMPY_DTYPES[code] for code in CODES]
        codes = {name for name, array in flat(parameters) if find_flaw(array, of_codes) is None}
        described = replace(described, quantization=scheme.with_head(codes))
    empty = ModelFiles(plan=LoadPlan(PLACE, "memory"), directory=PLACE, **vars(described))
    files = with_parameters(empty, parameters)
    return replace(files, plan=replace(files.plan, may_alias=may_alias))


def with_parameters(files: ModelFiles, parameters: Parameters) -> ModelFiles:
    """Returns the same model with other weights; it raises what `open_parameters` raises."""
    if not isinstance(parameters, Mapping | nnx.Module):
        raise TypeError(
            "parameters must be a dict of arrays by name, or a module of Flax NNX; got "
            f"{parameters!r:.80}"
        )
    problems = Problems(PLACE)
    weights = model_weights(files.family, files.spec, files.rule)
    if isinstance(parameters, nnx.Module):
        arrays = {
            name: array
            for name, array in flat(nnx.to_pure_dict(nnx.state(parameters)))
            if not isinstance(array, jax.ShapeDtypeStruct)  # declared, and never filled
        }
        if trainer_of(arrays) is None:
            return _with_module(files, arrays, weights, problems)
    else:
        arrays = dict(flat(parameters))
    arrays = hugging_face_names(arrays, files.config)
    known = {name for weight in weights for name in weight.tensor_names}
    if (
        arrays
        and arrays.keys() == {_place(weight) for weight in weights}
        and known.isdisjoint(arrays)
    ):
        problems.add(
            "these are parameters as TrainableModel.load returns them: give model.named(parameters)"
        )
        problems.raise_if_any()
    plan = _fit(files, arrays, weights, problems)
    vision = files.vision and _fit_vision(files.vision, arrays, problems)
    return replace(files, directory=PLACE, plan=plan, vision=vision)


def _fit_vision(
    vision: VisionFiles, arrays: Mapping[str, Any], problems: Problems
) -> VisionFiles | None:
    """Fits the encoder of pictures; None if it is not among the arrays."""
    empty = LoadPlan(PLACE, "memory", arrays=arrays)
    stored = array_headers(
        {name: array for name, array in arrays.items() if find_flaw(array) is None}
    )
    fitted = fit_vision(vision.family, vision.spec, empty, stored, problems, compare=False)
    problems.raise_if_any()
    return fitted


def _with_module(
    files: ModelFiles, arrays: dict[str, Any], weights: Sequence[Weight], problems: Problems
) -> ModelFiles:
    """Fits a module: each parameter is one tensor, whose name is its path in the module."""
    if files.quantization is not None:
        raise UnsupportedError(
            "a module cannot be quantised; give its arrays under the names of the checkpoint"
        )
    if not arrays:
        problems.add("the model has no arrays yet")
        problems.raise_if_any()
    alone = [
        replace(parameter, sources=(tensor(_place(parameter), *parameter.shape),))
        for parameter in weights
    ]
    plan = _fit(files, arrays, alone, problems)
    filled = tuple(
        replace(parameter, weight=weight)
        for parameter, weight in zip(plan.parameters, weights, strict=True)
    )
    module = replace(plan, layout="module", parameters=filled)
    return replace(files, directory=PLACE, plan=module, vision=None)


def _place(weight: Weight) -> str:
    return ".".join(map(str, weight.path))


def _fit(
    files: ModelFiles,
    arrays: Mapping[str, Any],
    weights: Sequence[Weight],
    problems: Problems,
) -> LoadPlan:
    refused = {name: problem for name, array in arrays.items() if (problem := find_flaw(array))}
    # A refused array keeps its name among the stored ones, so that it is not reported as missing,
    # too.
    stored = {name: TensorInfo(name, "", (), PLACE, 0, 0) for name in refused} | array_headers(
        {name: array for name, array in arrays.items() if name not in refused}
    )
    empty = LoadPlan(PLACE, "memory", arrays=arrays)
    ignored = find_ignored_tensors(files.family, files.spec)
    plan = fit_stored(
        empty,
        stored,
        weights,
        ignored,
        problems,
        compare=False,
        scheme=files.quantization,
        refused=refused.keys(),
    )
    for name, problem in refused.items():
        problems.add(f"{name!r} {problem}")
    for filled in plan.parameters:
        for piece, info in filled.pieces:
            copies = [
                arrays[name]
                for name in piece.names
                if name in stored.keys() - refused - {info.name}
            ]
            if info.name not in refused and any(
                not _have_same_numbers(arrays[info.name], copy) for copy in copies
            ):
                problems.add(f"{info.name!r} is given under another name too, with other numbers")
    problems.raise_if_any()
    return plan


def _have_same_numbers(array: Any, other: Any) -> bool:
    """Returns whether two arrays are equal; arrays of JAX are compared where they are."""
    if array is other:
        return True
    is_on_devices = isinstance(array, jax.Array) and isinstance(other, jax.Array)
    if is_on_devices and array.devices() == other.devices():
        return bool(jnp.array_equal(array, other))
    return np.array_equal(np.asarray(array), np.asarray(other))


def array_headers(arrays: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Returns what a file would say of arrays that can be weights."""
    return {
        name: TensorInfo(name, _CODES[array.dtype], tuple(array.shape), PLACE, 0, int(array.nbytes))
        for name, array in arrays.items()
    }


def find_flaw(array: Any, dtypes: Collection[np.dtype[Any]] = _CODES) -> str | None:
    """Returns why an array cannot be a weight that has one of these types; None if it can."""
    if not isinstance(array, np.ndarray | jax.Array):
        return f"is a {type(array).__name__}, and no array of numpy or JAX"
    if array.dtype not in dtypes:
        return f"has dtype {array.dtype}, not one of {', '.join(map(str, dtypes))}"
    is_traced = isinstance(array, jax.core.Tracer)
    if isinstance(array, jax.Array) and not is_traced and array.is_deleted():
        return "was deleted or donated: its numbers are gone"
    return None


def name_parameters(plan: LoadPlan, tree: Mapping[Any, Any]) -> dict[str, jax.Array]:
    """Returns the arrays of a loaded model by their names and in their shapes in its checkpoint."""
    pairs = ((filled, entry_at(tree, filled.weight.path)) for filled in plan.parameters)
    return {name: part for filled, array in pairs for name, part in _parts(plan, filled, array)}


def check_all_finite(plan: LoadPlan, tree: Mapping[Any, Any]) -> None:
    """Checks the tensors of loaded weights where they are; those that are wrong come to the host.

    Raises:
        CheckpointError: Some have numbers that are NaN or infinite.
    """
    problems = Problems(plan.directory)
    for filled in plan.parameters:
        array = entry_at(tree, filled.weight.path)
        if bool(jnp.isfinite(array).all()):
            continue
        for name, part in _parts(plan, filled, np.asarray(array)):
            if not np.isfinite(part).all():
                problems.add(f"{name!r} has numbers that are NaN or infinite")
    problems.raise_if_any()


def check_finite_parts(plan: LoadPlan, parts: Mapping[LayerPath, Sequence[jax.Array]]) -> None:
    """Checks weights that are divided among devices, without joining them.

    Args:
        plan: The tensors that fill the parameters.
        parts: The parts of each parameter that are on devices of this process, by its path.

    Raises:
        CheckpointError: Some have numbers that are NaN or infinite.
    """
    problems = Problems(plan.directory)
    for filled in plan.parameters:
        if all(bool(jnp.isfinite(part).all()) for part in parts[filled.weight.path]):
            continue
        names = " or ".join(repr(piece.name) for piece, _ in filled.pieces)
        problems.add(f"{names} has numbers that are NaN or infinite")
    problems.raise_if_any()


def _parts(plan: LoadPlan, filled: Filled, array: Any) -> Iterator[tuple[str, Any]]:
    """Yields the tensors of the checkpoint that a parameter's array consists of."""
    # The pieces of a module are named by its paths, and the weight has the names of the checkpoint.
    pieces = [piece for piece, _ in filled.pieces]
    for piece in filled.weight.sources[0].pieces if plan.layout == "module" else pieces:
        part = array[
            tuple(
                slice(start, start + size)
                for start, size in zip(piece.offset, piece.shape, strict=True)
            )
        ]
        yield (
            piece.name,
            part.swapaxes(-1, -2) if piece.transpose else part.reshape(piece.stored_shape),
        )


def flat(parameters: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the entries of a nested dict, with the keys joined by dots."""
    for key, value in parameters.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
