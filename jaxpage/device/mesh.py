"""The devices of an engine, and the only place that puts arrays on them. One device is a mesh of one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class DeviceMesh:
    devices: tuple[jax.Device, ...]

    @property
    def first(self) -> jax.Device:
        """What the devices are: they are all alike."""
        return self.devices[0]

    def put(self, array: Any) -> jax.Array:
        """An array of the host, on every device."""
        return jax.device_put(array, self.first)

    def zeros(self, shapes: Any) -> Any:
        """Arrays of these shapes and types, in a tree as theirs: in one call, since one for each takes up to ten times as long."""
        leaves, tree = jax.tree.flatten(shapes)
        alike = tuple(jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in leaves)
        return jax.tree.unflatten(tree, _zeros(alike, self.first))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _zeros(shapes: tuple[jax.ShapeDtypeStruct, ...], device: jax.Device) -> list[jax.Array]:
    return [jnp.zeros(shape.shape, shape.dtype, device=device) for shape in shapes]


def make_mesh() -> DeviceMesh:
    """Of the first device that JAX has."""
    return DeviceMesh((jax.devices()[0],))


def shapes_of(arrays: Any) -> Any:
    """A tree of arrays as shapes, types and places, for compiling: it holds nothing on the device."""
    return jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=one.sharding), arrays)
