"""Fits the tensors of a checkpoint to the parameters of a model, refuses all that does not fit at once, and loads.

Weights that are NaN or infinite are loaded as they are: whether they are meant is not for a loader to say.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxpage.checkpoints.orbax_files import has_orbax, read_orbax_tensors, restore_orbax
from jaxpage.checkpoints.problems import Problems, quoted
from jaxpage.checkpoints.safetensors_files import NUMPY_DTYPES, has_safetensors, map_array, read_tensors
from jaxpage.checkpoints.safetensors_header import TensorInfo
from jaxpage.models.weights import Weight

COMPARED_BYTES = 1 << 26  # of two copies of a tensor, at a time


@dataclass(frozen=True)
class LoadPlan:
    """Which stored tensor fills which parameter; made by `check_weights`, so all of it fits."""

    directory: Path
    layout: str  # "safetensors" or "orbax"; the names and shapes of the tensors are the same in both
    sources: tuple[tuple[Weight, TensorInfo], ...]

    def num_bytes(self, dtype: str | None = None) -> int:
        """Bytes of the parameters in `dtype` ("float32", "bfloat16", "float16"), or as they are stored."""
        return sum(math.prod(w.shape) * element_type(dtype, info).itemsize for w, info in self.sources)

    def stored_dtype(self) -> str:
        """The dtype that most bytes of the checkpoint have: "float32", "bfloat16" or "float16"."""
        counts: dict[str, int] = {}
        for weight, info in self.sources:
            name = NUMPY_DTYPES[info.dtype].name
            counts[name] = counts.get(name, 0) + math.prod(weight.shape)
        return max(counts, key=lambda name: counts[name])


def element_type(dtype: str | None, info: TensorInfo) -> np.dtype[Any]:
    """The numpy dtype named `dtype`; that of the stored tensor when None."""
    if dtype is None:
        return NUMPY_DTYPES[info.dtype]
    by_name = {known.name: known for known in NUMPY_DTYPES.values()}
    if dtype not in by_name:
        raise ValueError(f"dtype is {dtype!r}, not one of {', '.join(by_name)}")
    return by_name[dtype]


def check_weights(directory: Path, weights: Sequence[Weight], ignored: Sequence[str] = ()) -> LoadPlan:
    """Fit the checkpoint to `weights`; tensors whose names match a glob of `ignored` may stay unused.

    Raises one CheckpointError that lists every corrupt file, every missing, unexpected or misshapen tensor, every dtype
    that weights cannot have, and every tensor stored twice with different numbers. Nothing reaches the device.
    """
    problems = Problems(Path(directory))
    plan = fit(Path(directory), weights, ignored, problems)
    problems.raise_if_any()
    return plan


def fit(
    directory: Path, weights: Sequence[Weight], ignored: Sequence[str], problems: Problems, *, compare: bool = True
) -> LoadPlan:
    """As `check_weights`, but adds to `problems`. compare: read what is stored under two names to see that it agrees."""
    layout, stored = read_layout(directory, problems)
    return fit_stored(LoadPlan(directory, layout, ()), stored, weights, ignored, problems, compare=compare)


def fit_stored(
    plan: LoadPlan,
    stored: Mapping[str, TensorInfo],
    weights: Sequence[Weight],
    ignored: Sequence[str],
    problems: Problems,
    *,
    compare: bool = True,
) -> LoadPlan:
    """As `fit`, of tensors whose headers have been read; what was wrong with those is in `problems`. Returns the plan, filled."""
    files_sound, unused = not problems, dict(stored)
    sources = []
    for weight in weights:
        found = [unused.pop(name) for name in (weight.name, *weight.aliases) if name in unused]
        fitting = [info for info in found if _fits(weight, info, problems)]
        if found:
            sources.append((weight, found[0]))
        elif stored or files_sound:  # with no readable file at all, a list of every tensor tells nothing
            problems.add(f"tensor {quoted(weight.name)} of shape {weight.shape} is missing")
        for copy in fitting[1:]:
            if plan.layout == "orbax":
                problems.add(f"tensors {quoted(fitting[0].name)} and {quoted(copy.name)} are one parameter, kept twice")
            elif compare and files_sound:
                _check_copy(fitting[0], copy, problems)
    for name in sorted(unused):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored):
            problems.add(f"tensor {quoted(name)} of shape {unused[name].shape} is unexpected")
    return replace(plan, sources=tuple(sources))


def read_layout(directory: Path, problems: Problems) -> tuple[str, dict[str, TensorInfo]]:
    """The layout of the directory, and its tensors by name; headers only."""
    if has_orbax(directory) and has_safetensors(directory):
        problems.add("there are both safetensors files and an orbax directory: which of them is meant?")
        return "safetensors", {}
    if has_orbax(directory):
        return "orbax", read_orbax_tensors(directory, problems)
    return "safetensors", read_tensors(directory, problems)


def load_weights(
    plan: LoadPlan, dtype: str | None, put: Callable[[np.ndarray], Any], *, progress: bool = False
) -> dict[Any, Any]:
    """The parameters as a nested dict keyed by `Weight.path`, each one `put(array)`.

    `array` has the parameter's shape and `dtype`, is row major and owns its memory, so `put` may keep it.
    Tensors are read, transposed and converted one at a time, so the host never holds two copies of the model (an Orbax
    checkpoint is restored whole, and given away piece by piece). dtype None keeps each tensor as it is stored.
    A progress bar counts bytes on standard error. Raises CheckpointError when the data is damaged.
    """
    tree: dict[Any, Any] = {}
    with _bar(plan, dtype, progress) as bar:
        for weight, info, array in stored_arrays(plan):
            owned = np.array(_oriented(weight, array), element_type(dtype, info), order="C")
            insert(tree, weight.path, put(owned))
            bar.update(owned.nbytes)
    return tree


def load_sharded(
    plan: LoadPlan,
    dtype: str | None,
    sharding_of: Callable[[Weight], jax.sharding.Sharding],
    *,
    progress: bool = False,
) -> dict[Any, Any]:
    """As `load_weights`, straight onto devices: each parameter is sharded by `sharding_of(weight)`, and only the part
    of a device is read for it. Shardings are over the parameter's axes (after the transposition, if there is one).
    """
    tree: dict[Any, Any] = {}
    targets: dict[str, Any] = {}
    if plan.layout == "orbax":
        for weight, info in plan.sources:
            if not weight.transpose:  # Orbax cannot transpose: those come through the host
                wanted = element_type(dtype, info)
                targets[info.name] = jax.ShapeDtypeStruct(weight.shape, wanted, sharding=sharding_of(weight))
    with _bar(plan, dtype, progress) as bar:
        for weight, info, array in stored_arrays(plan, targets):
            if not isinstance(array, jax.Array):
                array = _sharded(_oriented(weight, array), element_type(dtype, info), sharding_of(weight))
            insert(tree, weight.path, array)
            bar.update(array.nbytes)
    return tree


def stored_arrays(plan: LoadPlan, targets: dict[str, Any] | None = None) -> Iterator[tuple[Weight, TensorInfo, Any]]:
    """Every tensor as it is stored: a view of its file; from Orbax a numpy array, or what `targets[name]` asks for."""
    if plan.layout == "safetensors":
        for weight, info in plan.sources:
            yield weight, info, map_array(info)
        return
    wanted: dict[str, Any] = {}
    for weight, info in plan.sources:
        # One element stands for all: the target only tells Orbax the shape and the dtype.
        default = np.broadcast_to(np.empty((), element_type(None, info)), weight.shape)
        insert(wanted, info.name.split("."), (targets or {}).get(info.name, default))
    restored = restore_orbax(plan.directory, wanted)
    for weight, info in plan.sources:
        *parents, last = info.name.split(".")
        branch = restored
        for key in parents:
            branch = branch[key]
        yield weight, info, branch.pop(last)  # given away: nothing here holds it any longer


def insert(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _fits(weight: Weight, info: TensorInfo, problems: Problems) -> bool:
    if info.shape != weight.shape:
        problems.add(f"tensor {quoted(info.name)} has shape {info.shape}, and the model needs {weight.shape}")
    if info.dtype not in NUMPY_DTYPES:
        problems.add(f"tensor {quoted(info.name)} has dtype {info.dtype}, not one of {', '.join(NUMPY_DTYPES)}")
    return info.shape == weight.shape and info.dtype in NUMPY_DTYPES


def same_bytes(info: TensorInfo, copy: TensorInfo) -> bool:
    """Of two tensors in safetensors files, in the dtypes that weights can have."""
    if (info.dtype, info.shape) != (copy.dtype, copy.shape):
        return False
    first, second = (map_array(tensor).reshape(-1).view(np.uint8) for tensor in (info, copy))
    chunks = range(0, len(first), COMPARED_BYTES)
    return all(np.array_equal(first[at : at + COMPARED_BYTES], second[at : at + COMPARED_BYTES]) for at in chunks)


def _check_copy(info: TensorInfo, copy: TensorInfo, problems: Problems) -> None:
    """Two names for one tensor (tied embeddings saved in full) must hold the same bytes."""
    if not same_bytes(info, copy):
        problems.add(f"tensors {quoted(info.name)} and {quoted(copy.name)} are one parameter, but they differ")


def _oriented(weight: Weight, array: np.ndarray) -> np.ndarray:
    return array.T if weight.transpose else array


def _sharded(array: np.ndarray, dtype: np.dtype[Any], sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: np.array(array[index], dtype, order="C"), dtype=dtype
    )


def _bar(plan: LoadPlan, dtype: str | None, progress: bool) -> tqdm[Any]:
    total = plan.num_bytes(dtype)
    return tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=None if progress else True)
