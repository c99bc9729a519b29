"""Moves weights to the host's memory and back, so that a model can sleep without its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class HostArray:
    """Holds on the host what an array was on the devices of this process.

    Attributes:
        shape: The shape of the whole array.
        sharding: The places of its parts.
        parts: The numbers of each part, with its device.
    """

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    parts: tuple[tuple[jax.Device, np.ndarray], ...]


def to_host(arrays: Any, *, deletes: bool = True) -> Any:
    """Returns a tree of arrays as `HostArray`s.

    An array that is in the tree twice, such as a tied head, is copied once.

    Args:
        arrays: The tree.
        deletes: True deletes the arrays, one after the other; False leaves them to their owner.
    """

    def move(array: jax.Array) -> HostArray:
        shards = array.addressable_shards
        # A copy: on a CPU `np.asarray` would be a view of memory that `delete` gives back.
        parts = tuple((shard.device, np.array(shard.data)) for shard in shards)
        held = HostArray(array.shape, array.sharding, parts)
        if deletes:
            array.delete()
        return held

    return jax.tree.map(_once(move), arrays)


def to_device(held: Any) -> Any:
    """Returns the arrays of a tree of `HostArray`s on their devices; nothing is compiled."""

    def move(array: HostArray) -> jax.Array:
        parts = [jax.device_put(numbers, device) for device, numbers in array.parts]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)

    return jax.tree.map(_once(move), held, is_leaf=lambda leaf: isinstance(leaf, HostArray))


def _once(move: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that moves each object once, and then gives the same result again."""
    moved: dict[int, Any] = {}

    def move_once(array: Any) -> Any:
        if id(array) not in moved:
            moved[id(array)] = move(array)
        return moved[id(array)]

    return move_once
