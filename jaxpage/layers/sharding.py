"""Divides the weights of a model; `layers.sharded` has the layers of one that is divided.

There are C logical shards of the heads, of the feed-forward layers and of the vocabulary. Each of n
devices has C / n shards and computes them one after another, in the shapes that each of C devices
would have. The shards' shares of the hidden state are gathered and added up in a fixed tree, so the
bits of a result depend on C and not on the number of devices. Where this is not asked for, C is the
number of devices, and the sum is in the fastest order:

    device 0   shard 0 ─┐             C = 4, n = 2
               shard 1 ─┴ + ─┐
    device 1   shard 2 ─┐    + ── hidden state, on both devices
               shard 3 ─┴ + ─┘

No family knows of this: `models.sharding` puts these layers in the place of the family's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.errors import ConfigError
from jaxpage.layers.linear import Linear, LinearSpec, Part
from jaxpage.layers.parameter import Axis
from jaxpage.layers.quantized import Quantized

DEVICE_AXIS = "devices"  # The axis of the mesh.
SHARED = {"heads": "query heads", "ffn": "feed-forward columns", "expert": "experts"}


@dataclass(frozen=True)
class Sharding:
    """Describes how a model is divided.

    Attributes:
        num_kv_heads: The key/value heads of the whole model.
        num_devices: The number of devices (n).
        num_shards: The number of shards (C), a multiple of n; 1 if nothing is divided.
        invariant: True if sums are in float32 and in a fixed tree.
    """

    num_kv_heads: int
    num_devices: int = 1
    num_shards: int = 1
    invariant: bool = False

    @property
    def is_divided(self) -> bool:
        """Returns whether there is more than one shard."""
        return self.num_shards > 1

    @property
    def num_local(self) -> int:
        """Returns the number of logical shards of a device."""
        return self.num_shards // self.num_devices

    @property
    def kv_heads_of_shard(self) -> int:
        """Returns the number of key/value heads of a shard.

        Where there are fewer heads than shards, some shards have copies of the same head.
        """
        return self.num_kv_heads // min(self.num_shards, self.num_kv_heads)

    @property
    def kv_heads_of_device(self) -> int:
        """Returns the number of key/value heads of a device, copies included."""
        return self.num_local * self.kv_heads_of_shard

    def count(self, axis: str | None) -> int:
        """Returns into how many parts an axis of that name is divided.

        Experts go to devices whole: a result's bits do not depend on their place.
        """
        if axis == "expert":
            return self.num_devices
        return self.num_shards if axis in ("heads", "kv_heads", "ffn", "vocab") else 1

    def size_of_part(self, axis: str | None, size: int) -> int:
        """Returns the size of a part of an axis. A vocabulary's last part is padded.

        Raises:
            ConfigError: The axis cannot be divided evenly.
        """
        count = self.count(axis)
        if axis == "kv_heads":
            return size // min(count, self.num_kv_heads)
        if axis == "vocab":
            return -(-size // count)
        if size % count:
            label = SHARED.get(str(axis), axis)
            raise ConfigError(
                f"tensor_parallel_size: {size} {label} cannot be divided into {count} equal parts"
            )
        return size // count

    def part(self, axis: str | None, size: int, place: int) -> slice:
        """Returns the range of the whole axis that the part at this place has."""
        size_of_part = self.size_of_part(axis, size)
        count = self.count(axis)
        if axis == "kv_heads":
            # Where heads are fewer than shards, neighbours have the same one.
            place = place * min(count, self.num_kv_heads) // count
        return slice(min(place * size_of_part, size), min((place + 1) * size_of_part, size))


UNDIVIDED = Sharding(1)


def gather(x: jax.Array, axis: int, sharding: Sharding) -> jax.Array:
    """Returns the parts of all devices, joined along an axis in the order of the devices."""
    return (
        x
        if sharding.num_devices == 1
        else jax.lax.all_gather(x, DEVICE_AXIS, axis=axis, tiled=True)
    )


def sum_over_devices(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Returns the sum over all devices, in any order.

    With `Sharding.invariant` one device at most has another number than zero in a place, and bits
    are added as integers, which is exact in any order.
    """
    added = x.view(f"int{8 * x.dtype.itemsize}") if sharding.invariant else x
    return x if sharding.num_devices == 1 else jax.lax.psum(added, DEVICE_AXIS).view(x.dtype)


def place_of_device(sharding: Sharding) -> jax.Array | int:
    """Returns the place, from 0, of the device that computes this."""
    return 0 if sharding.num_devices == 1 else jax.lax.axis_index(DEVICE_AXIS)


def total(parts: Sequence[jax.Array], sharding: Sharding) -> jax.Array:
    """Returns the sum over all logical shards, of which `parts` are this device's."""
    if not sharding.invariant:
        return sum_over_devices(parts[0], sharding)  # a device has one
    # The barrier keeps XLA from computing products and sums in another way where both are on one
    # device.
    stacked = jax.lax.optimization_barrier(gather(jnp.stack(parts), 0, sharding))
    sums = list(stacked)
    while len(sums) > 1:
        # The number of shards divides `LOGICAL_SHARDS`, a power of two, so none is without a
        # partner.
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


Layer = TypeVar("Layer", bound=nnx.Module)


def shard_of(
    whole: Layer, sharding: Sharding, axes: Sequence[str] = ("heads", "kv_heads", "ffn", "vocab")
) -> Layer:
    """Returns a layer of the same kind with a part of each parameter that has one of these axes.

    Codes are divided in the same way as their scales. No parameter of the part has a source in a
    checkpoint.

    Raises:
        ConfigError: An axis, or the groups of inputs that share a scale, cannot be divided.
    """
    shard: Layer = nnx.clone(whole)
    for _, each in nnx.iter_modules(shard):
        if isinstance(each, Quantized):
            each.group_size = _group_size_of_shard(each, sharding)
        if isinstance(each, Linear | Quantized):
            each.spec = _spec_of_shard(each.spec, sharding)
        if isinstance(each, Linear) and each.lora is not None:
            each.lora.rows = tuple(part.rows for part in each.spec.parts)
    for _, parameter in nnx.to_flat_state(nnx.state(shard)):
        struct = parameter.get_value()
        of_axes = parameter.get_metadata()["axes"]
        sizes = [
            sum(
                sharding.size_of_part(name, size) if name in axes else size
                for name, size in parts_of(axis, whole_size)
            )
            for axis, whole_size in zip(of_axes, struct.shape, strict=True)
        ]
        parameter.set_value(jax.ShapeDtypeStruct(tuple(sizes), struct.dtype))
        # The whole parameter is loaded and then divided, so a part names nothing.
        parameter.set_metadata(axes=(), sources=())
    return shard


def partial_of(whole: Linear, sharding: Sharding) -> Linear:
    """Returns the product with a shard's columns of a weight, one term of the sum over all shards.

    The bias is added once, after the sum (`Summed`).
    """
    shard = shard_of(whole, sharding)
    shard.bias = None
    shard.result = jnp.float32 if sharding.invariant else None
    return shard


def parts_of(axis: Axis, size: int) -> tuple[tuple[str | None, int], ...]:
    """Returns the name and the size of each part of a parameter's axis, fused or not."""
    return axis if isinstance(axis, tuple) else ((axis, size),)


def _group_size_of_shard(whole: Quantized, sharding: Sharding) -> int:
    num_in = whole.spec.num_in
    input_size = sharding.size_of_part(whole.spec.input_axis, num_in)
    if input_size < num_in and whole.group_size < num_in and input_size % whole.group_size:
        raise ConfigError(
            f"tensor_parallel_size: {whole.spec.parts[0].name} has {num_in} inputs of which each {whole.group_size} share a scale, and "
            f"cannot be divided into {num_in // input_size} parts of {input_size}"
        )
    # One scale for all inputs (`group_size` is their number) is that of each part.
    return min(whole.group_size, input_size)


def _spec_of_shard(spec: LinearSpec, sharding: Sharding) -> LinearSpec:
    parts = tuple(
        Part(sharding.size_of_part(part.axis, part.rows), part.axis, None) for part in spec.parts
    )
    return replace(
        spec, parts=parts, num_in=sharding.size_of_part(spec.input_axis, spec.num_in), fused=None
    )
