"""Holds the layers of a model that is divided among devices; see `layers.sharding`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

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
from jaxpage.layers.linear import Linear
from jaxpage.layers.mlp import MLP, GatedMLP
from jaxpage.layers.sharding import (
    Sharding,
    gather,
    partial_of,
    place_of_device,
    shard_of,
    sum_over_devices,
    total,
)
from jaxpage.layers.trace_scope import trace_scope


class Summed(nnx.Module):
    """Adds up the results of the shards, and then the bias, where there is one."""

    def __init__(self, output: Linear, sharding: Sharding):
        self.bias = output.spec.declare("bias") if output.bias is not None else None
        self.sharding = sharding

    def __call__(self, parts: Sequence[jax.Array], x_TD: jax.Array) -> jax.Array:
        """Returns the sum in the type of the hidden state."""
        y_TD = total(parts, self.sharding).astype(x_TD.dtype)
        return y_TD if self.bias is None else y_TD + self.bias[...][None, :]


def _whole_part(number: int, label: str, sharding: Sharding) -> int:
    """Returns a shard's share of things that stay whole.

    Raises:
        ConfigError: They cannot be divided evenly.
    """
    count = sharding.num_shards
    if number % count:
        raise ConfigError(
            f"tensor_parallel_size: {number} {label} cannot be divided into {count} equal parts; use fewer devices, with "
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
        # None where the product does not go by groups.
        groups = whole.num_groups and _whole_part(whole.num_groups, "groups of heads", sharding)

        def shard() -> Attention:
            part = shard_of(whole, sharding)
            part.output = partial_of(whole.output, sharding)
            part.num_groups = groups
            if whole.norm_over_all_heads:
                # They are over the heads of all shards: `__call__` computes them between the two
                # halves.
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
        by_shard = zip(self.shards, queries, keys, values, layer_pages, self._places(), strict=True)
        parts, pages = zip(
            *(
                shard.attend(q, k, v, shard_pages, context, at)
                for shard, q, k, v, shard_pages, at in by_shard
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
        # Shards that are neighbours have copies of a head, which the norm must count once.
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
        by_shard = zip(self.shards, layer_pages, strict=True)
        parts, pages = zip(
            *(shard(x_TD, shard_pages, context) for shard, shard_pages in by_shard), strict=True
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
            # Every shard needs all of the latent.
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
        # A device without a token's row gives zeros to the sum.
        embedding_TD: Any = 0
        for index, shard in enumerate(self.shards):
            row_T = ids_T - (first + index) * self.rows_of_shard
            is_own_T1 = ((row_T >= 0) & (row_T < self.rows_of_shard))[:, None]
            # A negative index would count from the end; what is read here is not selected below.
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
        # The cut is of the padding, which comes last because the last shard has it.
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
        local_TX = expert_TX - place_of_device(self.sharding) * count
        # Experts of other devices get a number that is no expert's here.
        local_TX = jnp.where((local_TX >= 0) & (local_TX < count), local_TX, count)
        return sum_over_devices(super().run(x_TD, local_TX), self.sharding)


def find_sharded_kind(
    module: nnx.Module, num_devices: int
) -> Callable[[Any, Sharding], nnx.Module] | None:
    """Returns the kind of layer that takes the place of one when it is divided; None for no other.

    Args:
        module: The layer.
        num_devices: The number of devices.
    """
    match module:
        case Attention():
            return ShardedAttention
        case LatentAttention():
            return ShardedLatentAttention
        case GatedDeltaNet():
            return ShardedDeltaNet
        case MLP() | GatedMLP():
            return ShardedMLP
        case Embedding(axis="vocab"):
            return ShardedEmbedding
        # Experts are whole on a device, so logical shards on one device change nothing of them.
        case Experts() if num_devices > 1:
            return ShardedExperts
    return None
