"""Defines the keys and values on the device: one donated pytree with the arrays of each layer.

A layer has two arrays, and two of scales where they are quantised. Latents, whose values lie within
the keys, have one array and one of scales. A recurrent layer has three arrays: see `StatePages`.
Block 0 is the null block, which takes padding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpage.device.hardware.mesh import DeviceMesh
from jaxpage.layers.sharding import Sharding
from jaxpage.models import KVSpec
from pallas_kernels import is_quantized
from pallas_kernels.page_layouts import interleaved_width

KV_HEAD_AXIS = 2  # the axis of K in pages and in their scales
# The types of pages by kv_cache_dtype; float8_e4m3fn is kept as its bits.
QUANTIZED = {"int8": "int8", "fp8": "uint8"}


class LayerPages(NamedTuple):
    """Holds one layer's blocks, in the layout of the kernels."""

    k_pages: jax.Array  # [P, S, K, H], or [P, S, 2K, W]: interleaved, see `page_layouts`
    v_pages: jax.Array | None  # [P, S, K, H]; None: values are within `k_pages`
    k_scale: jax.Array | None = None  # [P, S, K] in float32, of quantised pages
    v_scale: jax.Array | None = None

    @property
    def is_interleaved(self) -> bool:
        """Returns whether keys and values share an array; latents are of one head."""
        return self.v_pages is None and self.k_pages.shape[KV_HEAD_AXIS] > 1


class StatePages(NamedTuple):
    """Holds one recurrent layer's blocks; see `device.recurrence`."""

    inputs: jax.Array  # [P, S, E], the inputs of tokens
    # [P, ...] in float32, after the last computed token of a block; None for a convolution alone.
    state: jax.Array | None
    num_seen: jax.Array | None  # [P] in int32: the tokens of its sequence that the state has seen


KVPages = tuple[LayerPages | StatePages, ...]


def page_dtype(kv_cache_dtype: str, model_dtype: DTypeLike) -> jnp.dtype:
    """Returns the type of the pages for a value of `kv_cache_dtype`; "auto" is the model's own."""
    return jnp.dtype(QUANTIZED.get(kv_cache_dtype, model_dtype))


def bytes_per_layer(kv: KVSpec, block_size: int, dtype: DTypeLike) -> tuple[int, ...]:
    """Returns the bytes of one block in each layer, scales included."""
    return tuple(bytes_of_pages((layer,)) for layer in page_shapes(kv, 1, block_size, dtype))


def bytes_of_pages(pages: KVPages) -> int:
    """Returns the bytes of pages, or of their shapes."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(pages))


def page_shapes(
    kv: KVSpec,
    num_blocks: int | Sequence[int],
    block_size: int,
    dtype: DTypeLike,
    *,
    interleaved: bool = False,
) -> KVPages:
    """Returns the pages as shapes, for compiling ahead of time.

    Args:
        kv: What the layers keep.
        num_blocks: P of every layer, or a list with the P of each.
        block_size: The slots of a block (S).
        dtype: The type of the pages.
        interleaved: Says that keys and values share an array, in the layout for TPUs, where they
            can: not latents, and not in a type that has scales.
    """
    of_layers = [num_blocks] * kv.num_layers if isinstance(num_blocks, int) else num_blocks
    shapes: list[LayerPages | StatePages] = []
    for layer, count in enumerate(of_layers):
        if (state := kv.state_of(layer)) is not None:
            inputs = jax.ShapeDtypeStruct((count, block_size, state.input_width), dtype)
            states = num_seen = None
            if state.shape is not None:
                states = jax.ShapeDtypeStruct((count, *state.shape), jnp.float32)
                num_seen = jax.ShapeDtypeStruct((count,), jnp.int32)
            shapes.append(StatePages(inputs, states, num_seen))  # type: ignore[arg-type]
            continue
        num_kv_heads, head_dim = kv.heads_of(layer)
        slots = (count, block_size, num_kv_heads)
        page = jax.ShapeDtypeStruct((*slots, head_dim), dtype)
        scale = jax.ShapeDtypeStruct(slots, jnp.float32) if is_quantized(dtype) else None
        if kv.value_width is not None:
            shapes.append(LayerPages(page, None, scale, None))  # type: ignore[arg-type]
        elif interleaved and scale is None:
            slots = (count, block_size, 2 * num_kv_heads)
            shape = jax.ShapeDtypeStruct((*slots, interleaved_width(head_dim)), dtype)
            shapes.append(LayerPages(shape, None))  # type: ignore[arg-type]
        else:
            shapes.append(LayerPages(page, page, scale, scale))  # type: ignore[arg-type]
    return tuple(shapes)


def divide_shapes(of_shard: KVPages, num_local: int, mesh: DeviceMesh) -> KVPages:
    """Returns the shapes of the pages on all devices: each layer's pages in each shard of a device.

    Args:
        of_shard: The shapes of all layers in one shard.
        num_local: The shards of the model on a device.
        mesh: The devices.
    """
    shapes = tuple(layer for layer in of_shard for _ in range(num_local))
    return tuple(
        jax.tree.map(
            lambda page: mesh.shapes_of_whole(
                page, KV_HEAD_AXIS if page.ndim > KV_HEAD_AXIS else None
            ),
            shapes,
        )
    )


def in_groups(
    pages: KVPages, layer_groups: tuple[int, ...], move: Callable[[int, KVPages], KVPages]
) -> KVPages:
    """Moves the pages of each cache group that has layers, and returns the pages of all layers.

    Args:
        pages: The pages of all layers.
        layer_groups: The cache group of each layer.
        move: Takes the place of a group and the pages of its layers, and returns their new pages.
    """
    if len(set(layer_groups)) == 1:
        return move(layer_groups[0], pages)
    moved = list(pages)
    for group in sorted(set(layer_groups)):
        layers = [layer for layer, of_layer in enumerate(layer_groups) if of_layer == group]
        for layer, new in zip(
            layers, move(group, tuple(pages[layer] for layer in layers)), strict=True
        ):
            moved[layer] = new
    return tuple(moved)


def by_layer(pages: KVPages, sharding: Sharding) -> tuple[Any, ...]:
    """Returns each layer's pages; in a divided model, a layer's pages in each of its shards."""
    count = sharding.num_local
    return (
        tuple(pages[at : at + count] for at in range(0, len(pages), count))
        if sharding.is_divided
        else pages
    )


def in_a_row(of_layers: tuple[Any, ...], sharding: Sharding) -> KVPages:
    """Returns the pages of all layers in a row; see `by_layer`."""
    return tuple(itertools.chain(*of_layers)) if sharding.is_divided else of_layers
