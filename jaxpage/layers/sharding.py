"""Divides the weights of a model, and holds the layers of a model that is divided.

There are C logical shards of the heads, of the feed-forward layers and of the vocabulary. Each of n
devices has C / n shards and computes them one after another, in the shapes that each of C devices
would have. The shards' shares of the hidden state are gathered and added up in a fixed tree, so the
bits of a result depend on C and not on the number of devices. Where this is not asked for, C is the
number of devices, and the sum is in the fastest order:

    device 0   shard 0 ─┐             C = 4, n = 2
               shard 1 ─┴ + ─┐
    device 1   shard 2 ─┐    + ── hidden state, on both devices
               shard 3 ─┴ + ─┘

No family knows of this: `models.dividing` puts these layers in the place of the family's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpage.errors import ConfigError
from jaxpage.layers.attention import Attention
from jaxpage.layers.context import ForwardContext, LayerPages
from jaxpage.layers.delta_net import GatedDeltaNet
from jaxpage.layers.embedding import Embedding
from jaxpage.layers.expert_linear import ExpertLinear
from jaxpage.layers.experts import Experts
from jaxpage.layers.latent_attention import LatentAttention, LatentQueries
from jaxpage.layers.linear import Linear, LinearSpec, Part
from jaxpage.layers.mlp import MLP, GatedMLP
from jaxpage.layers.parameter import Axis
from jaxpage.layers.quantized import Quantized
from jaxpage.layers.trace_scope import trace_scope

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
            what = SHARED.get(str(axis), axis)
            raise ConfigError(
                f"tensor_parallel_size: {size} {what} cannot be divided into {count} equal parts"
            )
        return size // count

    def part(self, axis: str | None, size: int, place: int) -> slice:
        """Returns the range of the whole axis that the part at this place has."""
        size_of_part = self.size_of_part(axis, size)
        count = self.count(axis)
        if axis == "kv_heads":
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
    return min(whole.group_size, input_size)


def _spec_of_shard(spec: LinearSpec, sharding: Sharding) -> LinearSpec:
    parts = tuple(
        Part(sharding.size_of_part(part.axis, part.rows), part.axis, None) for part in spec.parts
    )
    return replace(
        spec, parts=parts, num_in=sharding.size_of_part(spec.input_axis, spec.num_in), fused=None
    )


class Summed(nnx.Module):
    """Adds up the results of the shards, and then the bias, where there is one."""

    def __init__(self, output: Linear, sharding: Sharding):
        self.bias = output.spec.declare("bias") if output.bias is not None else None
        self.sharding = sharding

    def __call__(self, parts: Sequence[jax.Array], x_TD: jax.Array) -> jax.Array:
        """Returns the sum in the type of the hidden state."""
        y_TD = total(parts, self.sharding).astype(x_TD.dtype)
        return y_TD if self.bias is None else y_TD + self.bias[...][None, :]


def _whole_part(number: int, what: str, sharding: Sharding) -> int:
    """Returns a shard's share of things that stay whole.

    Raises:
        ConfigError: They cannot be divided evenly.
    """
    count = sharding.num_shards
    if number % count:
        raise ConfigError(
            f"tensor_parallel_size: {number} {what} cannot be divided into {count} equal parts; use fewer devices, with "
            "tensor_parallel_reduction 'fast'"
        )
    return number // count


class ShardedAttention(nnx.Module):
    """Attends in shards, each with its query heads, their key/value heads and its own pages.

    Norms over all heads together see the heads of all shards.
    """

    def __init__(self, whole: Attention, sharding: Sharding):
        """Divides the layer.

        Raises:
            ConfigError: The product goes by groups of heads, and there are too few groups.
        """
        groups = whole.num_groups and _whole_part(whole.num_groups, "groups of heads", sharding)

        def shard() -> Attention:
            part = shard_of(whole, sharding)
            part.output = partial_of(whole.output, sharding)
            part.num_groups = groups
            if whole.norm_over_all_heads:
                part.query_norm = part.key_norm = None
            return part

        self.shards = nnx.List(shard() for _ in range(sharding.num_local))
        self.output = Summed(whole.output, sharding)
        self.sharding = sharding
        self.query_norm, self.key_norm = (
            (whole.query_norm, whole.key_norm) if whole.norm_over_all_heads else (None, None)
        )

    def __call__(
        self, x_TI: Float[Array, "T I"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer, and the pages of each shard."""
        projected = zip(*(shard.project(x_TI) for shard in self.shards), strict=True)
        queries, keys, values = map(list, projected)
        if self.query_norm is not None and self.key_norm is not None:
            queries = self._norm(self.query_norm, queries, self.sharding.num_shards)
            keys = self._norm(
                self.key_norm, keys, min(self.sharding.num_shards, self.sharding.num_kv_heads)
            )
        each = zip(self.shards, queries, keys, values, layer_pages, self._places(), strict=True)
        parts, pages = zip(
            *(
                shard.attend(q, k, v, shard_pages, context, at)
                for shard, q, k, v, shard_pages, at in each
            ),
            strict=True,
        )
        return self.output(parts, x_TI), pages

    def _norm(
        self, norm: Callable[[jax.Array], jax.Array], parts: Sequence[jax.Array], count: int
    ) -> list[jax.Array]:
        """Returns this device's parts after a norm over the parts of all devices.

        Args:
            norm: The norm.
            parts: The parts of this device's shards.
            count: The number of different parts that all shards have.
        """
        copies = self.sharding.num_shards // count
        every = gather(jnp.stack(parts, axis=1), 1, self.sharding)[:, ::copies]
        normed = norm(every.reshape(every.shape[0], -1)).reshape(every.shape)
        return [normed[:, place // copies] for place in self._places()]

    def _places(self) -> list[jax.Array | int]:
        """Returns the places of this device's shards among all."""
        first = place_of_device(self.sharding) * self.sharding.num_local
        return [first + index for index in range(self.sharding.num_local)]


class _OfShards(nnx.Module):
    """A layer whose shards all take the same input, each with its own pages."""

    def __init__(self, shard: Callable[[], nnx.Module], output: Linear, sharding: Sharding):
        self.shards = nnx.List(shard() for _ in range(sharding.num_local))
        self.output = Summed(output, sharding)

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer, and the pages of each shard."""
        each = zip(self.shards, layer_pages, strict=True)
        parts, pages = zip(
            *(shard(x_TD, shard_pages, context) for shard, shard_pages in each), strict=True
        )
        return self.output(parts, x_TD), pages


class ShardedLatentAttention(_OfShards):
    """Attends to latents in shards, each of which has its heads and all latents.

    The products that make the latents are on every device.
    """

    def __init__(self, whole: LatentAttention, sharding: Sharding):
        def shard() -> LatentAttention:
            part = shard_of(whole, sharding)
            part.num_heads = whole.num_heads // sharding.num_shards
            part.output = partial_of(whole.output, sharding)
            part.down = whole.down
            part.norm = whole.norm
            if isinstance(whole.queries, LatentQueries):
                part.queries = LatentQueries(
                    whole.queries.down, whole.queries.norm, shard_of(whole.queries.up, sharding)
                )
            return part

        super().__init__(shard, whole.output, sharding)


class ShardedDeltaNet(_OfShards):
    """Computes a delta net in shards, each with key heads, their value heads and their states."""

    def __init__(self, whole: GatedDeltaNet, sharding: Sharding):
        """Divides the layer.

        Raises:
            ConfigError: There are too few key heads.
        """
        widths = whole.widths
        widths = replace(
            widths,
            key_heads=_whole_part(widths.key_heads, "key heads of linear attention", sharding),
            value_heads=widths.value_heads // sharding.num_shards,
        )

        def shard() -> GatedDeltaNet:
            part = shard_of(whole, sharding)
            part.widths = widths
            part.output = partial_of(whole.output, sharding)
            return part

        super().__init__(shard, whole.output, sharding)


class ShardedMLP(nnx.Module):
    """Computes a feed-forward layer in shards, each with its columns of the inner layer."""

    def __init__(self, whole: MLP | GatedMLP, sharding: Sharding):
        def shard() -> MLP | GatedMLP:
            down = partial_of(whole.down, sharding)
            if isinstance(whole, GatedMLP):
                return GatedMLP(
                    shard_of(whole.gate_up, sharding), down, activation=whole.activation
                )
            activation = whole.activation
            if not isinstance(activation, str):
                activation = shard_of(activation, sharding)
            return MLP(shard_of(whole.up, sharding), down, activation=activation)

        self.shards = nnx.List(shard() for _ in range(sharding.num_local))
        self.down = Summed(whole.down, sharding)

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns the output of the layer."""
        return self.down([shard(x_TD) for shard in self.shards], x_TD)


class ShardedEmbedding(nnx.Module):
    """Holds a table in shards of its rows.

    The last shard's last rows may be padding, which is zero.
    """

    def __init__(self, whole: Embedding, sharding: Sharding):
        self.num_rows = whole.num_rows
        self.rows_of_shard = sharding.size_of_part("vocab", self.num_rows)
        self.sharding = sharding
        self.shards = nnx.List(shard_of(whole, sharding) for _ in range(sharding.num_local))

    def __call__(self, ids_T: Int[Array, "T"]) -> Float[Array, "T D"]:
        """Returns the rows of these ids, each of which one shard has."""
        first = place_of_device(self.sharding) * self.sharding.num_local
        embedding_TD: Any = 0
        for index, shard in enumerate(self.shards):
            row_T = ids_T - (first + index) * self.rows_of_shard
            is_own_T1 = ((row_T >= 0) & (row_T < self.rows_of_shard))[:, None]
            row_T = jnp.clip(row_T, 0, self.rows_of_shard - 1)
            embedding_TD = jnp.where(is_own_T1, shard(row_T), embedding_TD)
        return sum_over_devices(embedding_TD, self.sharding)

    def logits(self, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Returns the logits of the whole vocabulary, or of this device's rows.

        They are of this device's rows, with the padding after the last row, where the step divides
        the logits (`TraceScope`).
        """
        logits = jnp.concatenate([shard.logits(hidden_BD) for shard in self.shards], axis=1)
        is_divided = trace_scope().divided_logits and self.sharding.num_devices > 1
        return logits if is_divided else gather(logits, 1, self.sharding)[:, : self.num_rows]


class ShardedExperts(Experts):
    """Gives each device some of the experts; it computes the tokens that are routed to them.

    An expert's output is added to the zeros of the other devices.
    """

    def __init__(self, whole: Experts, sharding: Sharding):
        def part(layer: ExpertLinear) -> ExpertLinear:
            part = shard_of(layer, sharding, ("expert",))
            part.spec = replace(
                part.spec,
                num_experts=sharding.size_of_part("expert", part.spec.num_experts),
            )
            return part

        super().__init__(
            part(whole.gate_up),
            part(whole.down),
            activation=whole.activation,
            swiglu=whole.swiglu,
            scales_input=whole.scales_input,
        )
        self.sharding = sharding

    def run(self, x_TD: jax.Array, expert_TX: jax.Array) -> jax.Array:
        """Returns the output of each chosen expert for each token, from all devices."""
        count = self.gate_up.spec.num_experts
        own_TX = expert_TX - place_of_device(self.sharding) * count
        # Experts of other devices get a number that is no expert's here.
        own_TX = jnp.where((own_TX >= 0) & (own_TX < count), own_TX, count)
        return sum_over_devices(super().run(x_TD, own_TX), self.sharding)
