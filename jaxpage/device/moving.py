"""Moves blocks and slots of all layers of a cache group.

They are the model's layers and a drafter's, which have scratch blocks after those of the pool.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.hardware.mesh import DeviceMesh
from jaxpage.device.pages.kv_pages import KVPages


def copy_blocks(
    pages: KVPages, source: jax.Array, destination: jax.Array, backend: Backend
) -> KVPages:
    """Copies blocks of all layers; see `pallas_kernels.copy_blocks`."""
    return _each(pallas_kernels.copy_blocks, pages, source, destination, **backend.options)


def copy_slots(
    pages: KVPages, source: jax.Array, destination: jax.Array, backend: Backend
) -> KVPages:
    """Copies slots of all layers; see `pallas_kernels.copy_slots`."""
    return _each(pallas_kernels.copy_slots, pages, source, destination, **backend.options)


def gather_blocks(pages: KVPages, blocks: jax.Array, backend: Backend) -> jax.Array:
    """Returns the contents of blocks of all layers; see `pallas_kernels.gather_blocks`."""
    contents = [
        pallas_kernels.gather_blocks(group, blocks, **backend.options)
        for group in _by_length(pages)
    ]
    return contents[0] if len(contents) == 1 else jnp.concatenate(contents, axis=1)


def scatter_blocks(
    pages: KVPages, blocks: jax.Array, contents: jax.Array, backend: Backend
) -> KVPages:
    """Writes the contents of blocks of all layers; see `pallas_kernels.scatter_blocks`."""
    layers: list[Any] = []
    start = 0
    for group in _by_length(pages):
        stop = start + sum(
            math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(group)
        )
        layers += pallas_kernels.scatter_blocks(
            group, blocks, contents[:, start:stop], **backend.options
        )
        start = stop
    return tuple(layers)


def _each(move: Callable[..., KVPages], pages: KVPages, *arguments: Any, **options: Any) -> KVPages:
    return tuple(
        layer for group in _by_length(pages) for layer in move(group, *arguments, **options)
    )


def _by_length(pages: KVPages) -> list[KVPages]:
    """Returns the layers in runs of equally many blocks, which can be moved in one call."""
    groups = itertools.groupby(pages, key=lambda layer: layer[0].shape[0])
    return [tuple(layers) for _, layers in groups]


def shapes_of_swap(pages: KVPages, num_blocks: int, mesh: DeviceMesh) -> tuple[Any, Any]:
    """Returns the shapes of the block ids and of the blocks' bytes.

    Each device has the bytes of its own heads.
    """
    block_bytes = sum(
        mesh.num_bytes_of_device(page) // page.shape[0] for page in jax.tree.leaves(pages)
    )
    contents = jax.ShapeDtypeStruct((num_blocks, block_bytes), jnp.uint8)
    return mesh.whole(jax.ShapeDtypeStruct((num_blocks,), jnp.int32)), mesh.shapes_of_whole(
        contents, 1
    )
