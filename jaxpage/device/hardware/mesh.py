"""Holds the devices of an engine, and is the only place that puts arrays on them.

One device is a mesh of one. On several devices a step is one program that each of them runs on its
own part of the weights and of the pages (`shard_map`), so that layers and kernels see arrays of the
size that a device holds. What is not divided is the same on all devices.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpage.errors import ConfigError
from jaxpage.layers.sharding import DEVICE_AXIS


@dataclass(frozen=True)
class DeviceMesh:
    """Holds the devices of an engine, and puts arrays on them."""

    devices: tuple[jax.Device, ...]

    @property
    def first(self) -> jax.Device:
        """Returns this process's first device; all devices of a mesh are of one kind."""
        return next(
            device for device in self.devices if device.process_index == jax.process_index()
        )

    @property
    def size(self) -> int:
        """Returns the number of devices."""
        return len(self.devices)

    @functools.cached_property
    def is_one_process(self) -> bool:
        """Returns whether this process has all devices of the mesh, and can read their arrays."""
        return self.num_local == self.size

    @property
    def num_local(self) -> int:
        """Returns how many of the devices belong to this process."""
        return sum(device.process_index == jax.process_index() for device in self.devices)

    @functools.cached_property
    def _mesh(self) -> jax.sharding.Mesh:
        return jax.sharding.Mesh(np.array(self.devices), (DEVICE_AXIS,))

    def _along(self, axis: int | None) -> Any:
        """Returns the placement of an array that is divided along an axis.

        With None the whole array is on every device.
        """
        if self.size == 1:
            return self.first
        return NamedSharding(self._mesh, PartitionSpec() if axis is None else _spec(axis))

    def put(self, array: Any) -> jax.Array:
        """Puts an array of the host on every device.

        Each process has the same array, and puts it on its own devices.
        """
        if self.is_one_process:
            return jax.device_put(array, self._along(None))
        held = np.asarray(array)
        return jax.make_array_from_callback(
            held.shape, self._along(None), lambda index: held[index]
        )

    def put_shards(
        self, shape: tuple[int, ...], dtype: Any, make: Callable[[int], Any]
    ) -> jax.Array:
        """Makes an array of which each device has a part, joined along the first axis.

        Args:
            shape: The shape of a part.
            dtype: The type.
            make: Makes the part for the place of a device, as an array of numpy or of JAX.
        """
        if self.size == 1:
            return self.put(make(0))

        def part(index: tuple[slice, ...] | None) -> Any:
            assert index, "it has the axis that is divided"
            place = (index[0].start or 0) // shape[0]
            shard = make(place)
            if isinstance(shard, jax.Array):  # it does not come to the host
                return jax.device_put(shard, self.devices[place])
            return shard

        return jax.make_array_from_callback(
            (self.size * shape[0], *shape[1:]), self._along(0), part, dtype=dtype
        )

    def of_process(self, array: jax.Array, axis: int) -> Any:
        """Returns this process's parts of an array that is divided along an axis, joined."""
        if self.is_one_process:
            return array
        # In the order of the axis, whatever order JAX lists them in; `start` is None for a part
        # that is the whole axis.
        parts = sorted(array.addressable_shards, key=lambda shard: shard.index[axis].start or 0)
        return np.concatenate([np.asarray(part.data) for part in parts], axis)

    def from_process(self, array: np.ndarray, axis: int) -> Any:
        """Returns the whole array of which each process has what `of_process` gave it."""
        return (
            array
            if self.is_one_process
            else jax.make_array_from_process_local_data(self._along(axis), array)
        )

    def num_bytes_of_device(self, arrays: Any) -> int:
        """Returns the bytes that one device holds of a tree of arrays or shapes."""
        return sum(
            math.prod(array.shape)
            * array.dtype.itemsize
            // (self.size if any(_spec_of(array)) else 1)
            for array in jax.tree.leaves(arrays)
        )

    def whole(self, shapes: Any) -> Any:
        """Returns shapes and types, in a tree, of arrays that are the same on every device."""
        return self.shapes_of_whole(shapes, None)

    def shapes_of_whole(self, shapes: Any, axis: int | None) -> Any:
        """Returns the shapes of whole arrays of which each device has a part of these shapes.

        The parts are joined along `axis`; with None every device has the whole.
        """
        if self.size == 1:
            return shapes

        def of_all(shape: Any) -> jax.ShapeDtypeStruct:
            sizes = [
                size * (self.size if index == axis else 1) for index, size in enumerate(shape.shape)
            ]
            return jax.ShapeDtypeStruct(tuple(sizes), shape.dtype, sharding=self._along(axis))

        return jax.tree.map(of_all, shapes)

    def zeros(self, shapes: Any) -> Any:
        """Makes arrays of zeros of these shapes, types and places, in a tree like theirs.

        One call makes all of them: a call for each array takes up to ten times as long.
        """
        return compile_zeros(shapes, self)()

    def zero_shards(
        self, parts: Sequence[tuple[tuple[int, ...], bool]], dtype: Any
    ) -> list[jax.Array]:
        """Makes arrays of zeros.

        Args:
            parts: For each array, the shape that a device has of it, and whether each device has a
                part of its own (see `put_shards`).
            dtype: The type of all arrays.
        """
        shapes = [
            self.shapes_of_whole(jax.ShapeDtypeStruct(shape, dtype), 0 if is_divided else None)
            for shape, is_divided in parts
        ]
        # To make nothing would be compiled, too.
        arrays: list[jax.Array] = self.zeros(shapes) if shapes else []
        return arrays

    def on_each(
        self, function: Callable[..., Any], arguments: Any, results: Any
    ) -> Callable[..., Any]:
        """Returns a function of whole arrays that runs `function` on each device's part of them.

        Args:
            function: The function of a device's parts.
            arguments: Trees of arrays or shapes, or trees that begin as these do; None for
                arguments that are the same on every device.
            results: The same for the results.
        """
        if self.size == 1:
            return function
        in_specs, out_specs = (
            jax.tree.map(_spec_of, tree, is_leaf=lambda leaf: leaf is None)
            for tree in (arguments, results)
        )
        return jax.shard_map(
            # Kernels do not say along which axes their results vary, which JAX would check.
            function,
            mesh=self._mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )


def compile_zeros(shapes: Any, mesh: DeviceMesh) -> Any:
    """Returns the executable that makes what `DeviceMesh.zeros` returns, and takes nothing."""
    leaves, tree = jax.tree.flatten(shapes)
    # Shapes without places, which are in `places`, so that equal ones are one key of the cache.
    alike = tuple(jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in leaves)
    sharding = SingleDeviceSharding(mesh.first)
    places = tuple(sharding if mesh.size == 1 else shape.sharding for shape in leaves)
    return _compile_zeros(tree, alike, places)


@functools.cache
def _compile_zeros(
    tree: Any, shapes: tuple[jax.ShapeDtypeStruct, ...], places: tuple[Any, ...]
) -> Any:
    make_zeros = jax.jit(
        lambda: tree.unflatten([jnp.zeros(shape.shape, shape.dtype) for shape in shapes]),
        out_shardings=tree.unflatten(places),
    )
    return make_zeros.lower().compile()


def _spec(axis: int) -> PartitionSpec:
    return PartitionSpec(*(None,) * axis, DEVICE_AXIS)


def _spec_of(array: Any) -> PartitionSpec:
    sharding = getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def make_mesh(size: int = 1) -> DeviceMesh:
    """Returns a mesh of the first devices that JAX has, equally many of each process.

    Raises:
        ConfigError: JAX has too few devices, or their number cannot be divided by that of
            processes.
    """
    devices = _in_turn(jax.devices())
    if len(devices) < size:
        hint = (
            f"; XLA_FLAGS=--xla_force_host_platform_device_count={size} makes as many of a CPU"
            if devices[0].platform == "cpu"
            else ""
        )
        raise ConfigError(
            f"tensor_parallel_size is {size}, but JAX has {len(devices)} {devices[0].platform} "
            f"device(s){hint}"
        )
    if size % (count := jax.process_count()):
        raise ConfigError(
            f"tensor_parallel_size is {size}; {count} hosts need a multiple of {count}"
        )
    # A process's devices are next to each other, so its parts of an array are one range.
    return DeviceMesh(tuple(sorted(devices[:size], key=lambda device: device.process_index)))


def _in_turn(devices: list[jax.Device]) -> list[jax.Device]:
    """Returns the first device of each process, then the second of each, and so on."""
    seen: Counter[int] = Counter()
    places = {}
    for device in devices:
        places[device] = seen[device.process_index]
        seen[device.process_index] += 1
    return sorted(devices, key=lambda device: (places[device], device.process_index))


def shapes_of(arrays: Any) -> Any:
    """Returns a tree of arrays as shapes, types and places, which hold nothing on the device."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding),
        arrays,
    )
