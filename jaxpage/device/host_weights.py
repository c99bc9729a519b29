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

    def moved(array: jax.Array) -> HostArray:
        shards = array.addressable_shards
        parts = tuple((shard.device, np.array(shard.data)) for shard in shards)
        held = HostArray(array.shape, array.sharding, parts)
        if deletes:
            array.delete()
        return held

    return jax.tree.map(_once(moved), arrays)


def to_device(held: Any) -> Any:
    """Returns the arrays of a tree of `HostArray`s on their devices; nothing is compiled."""

    def moved(one: HostArray) -> jax.Array:
        parts = [jax.device_put(numbers, device) for device, numbers in one.parts]
        return jax.make_array_from_single_device_arrays(one.shape, one.sharding, parts)

    return jax.tree.map(_once(moved), held, is_leaf=lambda leaf: isinstance(leaf, HostArray))


def _once(move: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that moves each object once, and then gives the same result again."""
    moved: dict[int, Any] = {}

    def moved_once(one: Any) -> Any:
        if id(one) not in moved:
            moved[id(one)] = move(one)
        return moved[id(one)]

    return moved_once
