"""Weights that are in memory already, under the names of Hugging Face: fitted to a model as those of files are, and given back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpage.checkpoints.config_file import check_sizes
from jaxpage.checkpoints.fitting import LoadPlan, fit_stored
from jaxpage.checkpoints.opening import ModelFiles, describe_config
from jaxpage.checkpoints.problems import Problems
from jaxpage.checkpoints.safetensors_files import NUMPY_DTYPES
from jaxpage.checkpoints.safetensors_header import TensorInfo
from jaxpage.errors import UnsupportedError
from jaxpage.models.base import model_weights
from jaxpage.models.fields import text_part
from jaxpage.models.quantization.registry import quantization_of
from jaxpage.models.weights import Weight, tensor

PLACE = Path("(parameters in memory)")  # where messages say that they are
Parameters = Mapping[str, Any] | nnx.Module
_CODES = {dtype: code for code, dtype in NUMPY_DTYPES.items()}


def open_parameters(config: Mapping[str, Any], parameters: Parameters, quantization: str | None = None) -> ModelFiles:
    """A model whose config.json is a dict and whose weights are arrays: in a flat or a nested dict, or a module of its family.

    Raises one CheckpointError listing all that does not fit.
    """
    problems, config = Problems(PLACE), text_part(config)
    check_sizes(config, problems)
    described = describe_config(config, lambda: quantization_of(config, quantization), problems)
    problems.raise_if_any()
    assert described is not None
    empty = ModelFiles(plan=LoadPlan(PLACE, "memory"), directory=PLACE, **vars(described))
    return with_parameters(empty, parameters)


def with_parameters(files: ModelFiles, parameters: Parameters, *, check_finite: bool = False) -> ModelFiles:
    """The same model with other weights. Raises as `open_parameters`; check_finite: also for numbers that are NaN or infinite."""
    problems, weights = Problems(PLACE), model_weights(files.family, files.spec, files.rule)
    if isinstance(parameters, nnx.Module):
        return _with_module(files, parameters, weights, problems, check_finite=check_finite)
    plan = _fitted(files, dict(flat(parameters)), weights, problems, check_finite=check_finite)
    return replace(files, directory=PLACE, plan=plan)


def _with_module(
    files: ModelFiles, module: nnx.Module, weights: Sequence[Weight], problems: Problems, *, check_finite: bool
) -> ModelFiles:
    """Each parameter is one tensor, whose name is its path in the module."""
    if files.quantization is not None:
        raise UnsupportedError("a module cannot be quantised; give its arrays under the names of the checkpoint")
    arrays = {
        name: array
        for name, array in flat(nnx.to_pure_dict(nnx.state(module)))
        if not isinstance(array, jax.ShapeDtypeStruct)  # declared, and never filled
    }
    alone = [replace(one, sources=(tensor(".".join(map(str, one.path)), *one.shape),)) for one in weights]
    plan = _fitted(files, arrays, alone, problems, check_finite=check_finite)
    filled = tuple(replace(one, weight=weight) for one, weight in zip(plan.parameters, weights, strict=True))
    return replace(files, directory=PLACE, plan=replace(plan, layout="module", parameters=filled))


def _fitted(
    files: ModelFiles,
    arrays: Mapping[str, Any],
    weights: Sequence[Weight],
    problems: Problems,
    *,
    check_finite: bool,
) -> LoadPlan:
    stored = {}
    for name, array in arrays.items():
        dtype = np.dtype(getattr(array, "dtype", None))
        if dtype not in _CODES:
            problems.add(f"{name!r} has dtype {dtype}, not one of {', '.join(map(str, _CODES))}")
            continue
        stored[name] = TensorInfo(name, _CODES[dtype], tuple(array.shape), PLACE, 0, int(array.nbytes))
    empty, ignored = LoadPlan(PLACE, "memory", arrays=arrays), files.family.ignored
    plan = fit_stored(empty, stored, weights, ignored, problems, compare=False, scheme=files.quantization)
    for filled in plan.parameters:
        for piece, info in filled.pieces:
            copies = [arrays[name] for name in piece.names if name in stored and name != info.name]
            if any(not np.array_equal(np.asarray(arrays[info.name]), np.asarray(copy)) for copy in copies):
                problems.add(f"{info.name!r} is given under another name too, with other numbers")
            if check_finite and not np.isfinite(np.asarray(arrays[info.name], np.float32)).all():
                problems.add(f"{info.name!r} has numbers that are not finite")
    problems.raise_if_any()
    return plan


def named_parameters(plan: LoadPlan, tree: Mapping[Any, Any]) -> dict[str, jax.Array]:
    """The arrays of a loaded model by the names that they have in its checkpoint, shaped as there."""
    named = {}
    for filled in plan.parameters:
        array: Any = tree
        for key in filled.weight.path:
            array = array[key]
        own = [piece for piece, _ in filled.pieces]
        for piece in filled.weight.sources[0].pieces if plan.layout == "module" else own:
            part = array[tuple(slice(at, at + size) for at, size in zip(piece.offset, piece.shape, strict=True))]
            named[piece.name] = part.swapaxes(-1, -2) if piece.transpose else part.reshape(piece.stored_shape)
    return named


def flat(parameters: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Of a nested dict, with the keys joined by dots."""
    for key, value in parameters.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
