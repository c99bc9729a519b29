"""Packs the weights of a model in panels, and unpacks them; see `pallas_kernels.cpu.packed`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from pallas_kernels.cpu import packed
from pallas_kernels.cpu.packed import takes as takes

Path = tuple[str | int, ...]
# The numbers of outputs and inputs of each packed weight, by the path of its parameter.
Sizes = Mapping[Path, tuple[int, int]]


def pack_weights(parameters: Any, sizes: Sizes) -> None:
    """Puts weights in panels in the place of those that are loaded, one after the other.

    So at any time there are two copies of one weight at most.
    """
    for path in sizes:
        branch = _branch(parameters, path)
        if (array := branch.get(path[-1])) is not None:
            branch[path[-1]] = _of_each_part(array, packed.pack)
            array.delete()


def unpacked_weights(parameters: Any, sizes: Sizes) -> Any:
    """Returns the tree of all parameters, with the weights [out, in] of those in panels."""
    tree = jax.tree.map(lambda array: array, parameters)
    for path, size in sizes.items():
        branch = _branch(tree, path)
        if (array := branch.get(path[-1])) is not None:
            branch[path[-1]] = unpacked_weight(array, size)
    return tree


def unpacked_weight(array: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Returns the weight [out, in] of one in panels; each device has the same part as before."""
    return _of_each_part(array, lambda part: packed.unpack(part, *size))


def _branch(tree: Any, path: Path) -> Any:
    for key in path[:-1]:
        tree = tree.get(key) or {}
    return tree


def _of_each_part(array: jax.Array, change: Callable[[np.ndarray], np.ndarray]) -> jax.Array:
    """Returns an array of which each device has what `change` makes of its part."""
    shards = array.addressable_shards
    made = [
        jax.device_put(np.ascontiguousarray(change(np.asarray(shard.data))), shard.device)
        for shard in shards
    ]
    num_parts = array.shape[0] // shards[0].data.shape[0]
    shape = (num_parts * made[0].shape[0], *made[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, array.sharding, made)


def packed_product(weight: jax.Array) -> Callable[[jax.Array], jax.Array] | None:
    """Returns the function `x @ weight.T` by the kernel for CPUs; None where there is none."""
    if jax.default_backend() != "cpu" or not takes(weight.dtype):
        return None
    panels = jax.device_put(packed.pack(np.asarray(weight)))
    return lambda x: packed.multiply_packed(x, panels, len(weight), result=x.dtype)
