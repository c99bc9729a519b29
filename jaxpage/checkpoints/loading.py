"""Loads the parameters of a model one at a time, each from the stored tensors that fill it.

Weights that are NaN or infinite are loaded as they are: a loader cannot say whether they are meant.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxpage.checkpoints.fitting import Filled, LoadPlan
from jaxpage.checkpoints.gguf.tensors import read_gguf_array
from jaxpage.checkpoints.joining import are_on_devices, join_arrays, orient, split_array
from jaxpage.checkpoints.orbax_files import restore_orbax
from jaxpage.checkpoints.safetensors_files import NUMPY_DTYPES, map_array
from jaxpage.checkpoints.safetensors_header import TensorInfo
from jaxpage.models.parameters import Path
from jaxpage.models.sharding import Place, ShardedWeight


def load_weights(
    plan: LoadPlan, dtype: str | None, put: Callable[[Any], Any], *, progress: bool = False
) -> dict[Any, Any]:
    """Returns the parameters as a nested dict keyed by `Weight.path`, each one `put(array)`.

    The array has the parameter's shape and `dtype` (or its own), is row major and owns its memory
    (see `LoadPlan.may_alias`), so that `put` may keep it. Parameters are read and converted one at
    a time, those of GGUF one for each core, so that the host never holds two copies of the model.
    (An Orbax checkpoint is restored whole, and released piece by piece.) What is filled by arrays
    of JAX that need not be decoded is made on their devices and does not come to the host.

    Args:
        plan: The tensors that fill the parameters.
        dtype: The type of the parameters; None to keep each tensor as it is stored.
        put: Takes each array, and returns the entry of the dict.
        progress: True to show a bar over bytes on standard error.

    Raises:
        CheckpointError: The data is damaged.
    """

    def load(filled: Filled, arrays: list[Any]) -> tuple[dict[Path, Any], int]:
        target_dtype = filled.dtype(dtype)
        array: Any = _whole_array(filled, arrays[0], target_dtype)
        if array is not None:
            if not plan.may_alias:  # its owner may donate it
                array = jax.device_put(array, array.sharding, may_alias=False)
        elif are_on_devices(filled, arrays):
            array = join_arrays(filled, arrays, target_dtype)
        else:
            array = _assemble(
                filled, [np.asarray(array) for array in arrays], target_dtype, _whole(filled)
            )
        return {filled.weight.path: put(array)}, array.nbytes

    return _load(plan, dtype, load, make_array_reader(plan), progress)


def load_shards(
    plan: LoadPlan,
    dtype: str | None,
    weights: Sequence[ShardedWeight],
    put: Callable[[Any], Any],
    put_shards: Callable[[tuple[int, ...], Any, Callable[[int], Any]], Any],
    *,
    progress: bool = False,
) -> dict[Any, Any]:
    """Loads a model that is divided among devices, each of which gets only its part.

    See `load_weights`.

    Args:
        plan: The tensors that fill the parameters.
        dtype: The type of the parameters; None to keep each tensor as it is stored.
        weights: The weights of the plan, in its order.
        put: Takes an array that is the same on every device.
        put_shards: Takes the parts of an array; see `DeviceMesh`.
        progress: True to show a bar over bytes on standard error.
    """
    divided = {sharded.weight.path: sharded for sharded in weights}

    def load(filled: Filled, arrays: list[Any]) -> tuple[dict[Path, Any], int]:
        sharded = divided[filled.weight.path]
        target_dtype = filled.dtype(dtype)
        num_bytes = filled.weight.size * target_dtype.itemsize
        if are_on_devices(filled, arrays):
            whole = join_arrays(filled, arrays, target_dtype)
            return dict(_divide(sharded, whole, put, put_shards)), num_bytes
        on_host = [np.asarray(array) for array in arrays]
        part_of: Callable[[tuple[slice, ...]], np.ndarray] = functools.partial(
            _assemble, filled, on_host, target_dtype
        )
        # A stored tensor is decoded once, not for each of its parts.
        if any(piece.stored for piece, _ in filled.pieces):
            part_of = part_of(_whole(filled)).__getitem__
        made = {}
        for place in sharded.places:
            if sharded.axis is None:
                made[place.path] = put(part_of(_whole(filled)))
            else:
                made[place.path] = put_shards(
                    place.shape, target_dtype, functools.partial(_shard, sharded, place, part_of)
                )
        return made, num_bytes

    return _load(plan, dtype, load, make_array_reader(plan), progress)


def _divide(
    sharded: ShardedWeight,
    whole: jax.Array,
    put: Callable[[Any], Any],
    put_shards: Callable[[tuple[int, ...], Any, Callable[[int], Any]], Any],
) -> Iterator[tuple[Path, Any]]:
    """Yields the parameters that have parts of a weight on devices; see `load_shards`."""
    for place in sharded.places:
        if sharded.axis is None:
            yield place.path, put(whole)
            continue
        boxes = [sharded.boxes(place, device) for device in range(sharded.sharding.num_devices)]
        parts = split_array(whole, boxes, sharded.axis, place.shape[sharded.axis])
        yield place.path, put_shards(place.shape, whole.dtype, parts.__getitem__)


def _shard(
    sharded: ShardedWeight,
    place: Place,
    part_of: Callable[[tuple[slice, ...]], np.ndarray],
    device: int,
) -> np.ndarray:
    """Returns the part of a weight that a device has for one of its parameters.

    It is padded with zeros where it is smaller than the parameter.
    """
    assert sharded.axis is not None
    parts = [part_of(box) for box in sharded.boxes(place, device)]
    lacking = place.shape[sharded.axis] - sum(part.shape[sharded.axis] for part in parts)
    if lacking:
        shape = [
            lacking if index == sharded.axis else size for index, size in enumerate(place.shape)
        ]
        parts.append(np.zeros(shape, parts[0].dtype))
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=sharded.axis)


def _is_whole(filled: Filled) -> bool:
    """Returns whether the parameter is one stored tensor, as it is stored."""
    piece, _ = filled.pieces[0]
    return (
        len(filled.pieces) == 1
        and not piece.transpose
        and piece.stored_shape == filled.weight.shape
    )


def _whole_array(filled: Filled, array: Any, dtype: np.dtype[Any]) -> jax.Array | None:
    """Returns an array that is the parameter as it is, without the mesh of its owner.

    None where the parameter needs a conversion, other arrays, or several devices.
    """
    if not isinstance(array, jax.Array) or len(array.devices()) != 1:
        return None
    return array.addressable_data(0) if array.dtype == dtype and _is_whole(filled) else None


def aliased_bytes(plan: LoadPlan, dtype: str | None, device: Any) -> int:
    """Returns the bytes of arrays of a `jax.Device` that become parameters themselves."""
    if not plan.may_alias:
        return 0
    arrays = [
        _whole_array(filled, plan.arrays[filled.pieces[0][1].name], filled.dtype(dtype))
        for filled in plan.parameters
    ]
    return sum(array.nbytes for array in arrays if array is not None and array.device == device)


def _whole(filled: Filled) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in filled.weight.shape)


def make_array_reader(plan: LoadPlan) -> Callable[[TensorInfo], Any]:
    """Returns a function that reads tensors; those in memory stay where they are.

    Others are views of their files, or dequantised; from Orbax they are numpy arrays. A tensor of
    Orbax is released with the last of the pieces that it fills.
    """
    if plan.layout == "safetensors":
        return map_array
    if plan.layout == "gguf":
        return read_gguf_array
    if plan.is_in_memory:
        return lambda info: plan.arrays[info.name]
    files: dict[str, Any] = {}
    for info in plan.tensors.values():
        # One element is enough for all: the target only tells Orbax the shape and the dtype.
        target = np.broadcast_to(np.empty((), NUMPY_DTYPES[info.dtype]), info.shape)
        insert(files, info.name.split("."), target)
    restored = restore_orbax(plan.directory, files)
    remaining = Counter(info.name for filled in plan.parameters for _, info in filled.pieces)

    def read(info: TensorInfo) -> Any:
        *parents, last = info.name.split(".")
        branch = restored
        for key in parents:
            branch = branch[key]
        remaining[info.name] -= 1
        # The last reader takes the array out of the tree, so that its memory is free afterwards.
        return branch[last] if remaining[info.name] else branch.pop(last)

    return read


def insert(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    """Puts a value into a nested dict, at this path."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _load(
    plan: LoadPlan,
    dtype: str | None,
    load: Callable[[Filled, list[Any]], tuple[dict[Path, Any], int]],
    read: Callable[[TensorInfo], Any],
    progress: bool,
) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    total = plan.num_bytes(dtype)
    shown = None if progress else True

    def load_parameter(filled: Filled) -> tuple[dict[Path, Any], int]:
        return load(filled, [read(info) for _, info in filled.pieces])

    with (
        ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="weights") as pool,
        tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=shown) as bar,
    ):
        # Dequantising is work for all cores. Others are read as fast as memory or disk can, and one
        # at a time needs the least memory.
        for made, num_bytes in (pool.map if plan.layout == "gguf" else map)(
            load_parameter, plan.parameters
        ):
            for path, value in made.items():
                insert(tree, path, value)
            bar.update(num_bytes)
    return tree


def _assemble(
    filled: Filled, arrays: Sequence[np.ndarray], dtype: np.dtype[Any], index: tuple[slice, ...]
) -> np.ndarray:
    """Returns the part `index` of a parameter, and reads nothing else."""
    box = [part.indices(size)[:2] for part, size in zip(index, filled.weight.shape, strict=True)]
    result = np.empty([stop - start for start, stop in box], dtype)
    by_name = {piece.name: array for (piece, _), array in zip(filled.pieces, arrays, strict=True)}
    for (piece, _), array in zip(filled.pieces, arrays, strict=True):
        into = []
        out_of = []
        for (start, stop), offset, size in zip(box, piece.offset, piece.shape, strict=True):
            first = max(start, offset)
            last = min(stop, offset + size)
            into.append(slice(first - start, max(last, first) - start))
            out_of.append(slice(first - offset, max(last, first) - offset))
        if any(part.start == part.stop for part in into):
            continue  # The piece has nothing of this part, and is not decoded.
        others = [by_name[name] for name in piece.stored.beside] if piece.stored else []
        result[tuple(into)] = orient(piece, array, others)[tuple(out_of)]
    return result
