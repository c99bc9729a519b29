"""Defines how blocks and slots are moved: by a gather and a scatter for each array."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8

from pallas_kernels.kernel_set import Leaves


def copy_blocks(leaves: Leaves, source: Int[Array, "n"], destination: Int[Array, "n"]) -> Leaves:
    """Copies blocks of all leaves; see `pallas_kernels.copy_blocks`."""
    return [_write(leaf, destination, _read(leaf, source)) for leaf in leaves]


def copy_slots(leaves: Leaves, source: Int[Array, "n"], destination: Int[Array, "n"]) -> Leaves:
    """Copies slots of all leaves; see `pallas_kernels.copy_slots`."""
    # Use two indices: if a reshaped array is read and then written, XLA copies all of it.
    num_slots = leaves[0].shape[0] * leaves[0].shape[1]
    # A slot is clamped before it is cut into two indices: these would be clamped one by one, to
    # another slot.
    source = jnp.clip(source, 0, num_slots - 1)
    return [
        _write(leaf, _place(leaf, destination), _read(leaf, _place(leaf, source)))
        for leaf in leaves
    ]


Index = jax.Array | tuple[jax.Array, jax.Array]


def _read(leaf: jax.Array, index: Index) -> jax.Array:
    """Reads by an index; one outside the pages is clamped, below zero as well."""
    return leaf.at[index].get(mode="clip", wrap_negative_indices=False)


def _write(leaf: jax.Array, index: Index, values: jax.Array) -> jax.Array:
    """Writes by an index; one outside the pages is left out, below zero as well."""
    return leaf.at[index].set(values, mode="drop", wrap_negative_indices=False)


def _place(leaf: jax.Array, slots: Int[Array, "n"]) -> tuple[jax.Array, jax.Array]:
    return slots // leaf.shape[1], slots % leaf.shape[1]


def gather_blocks(leaves: Leaves, blocks: Int[Array, "n"]) -> UInt8[Array, "n block_bytes"]:
    """Returns the contents of blocks as bytes; see `pallas_kernels.gather_blocks`."""
    return jnp.concatenate([_as_bytes(_read(leaf, blocks)) for leaf in leaves], axis=1)


def scatter_blocks(
    leaves: Leaves, blocks: Int[Array, "n"], contents: UInt8[Array, "n block_bytes"]
) -> Leaves:
    """Writes bytes into blocks; see `pallas_kernels.scatter_blocks`."""
    ends = np.cumsum([leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in leaves])
    parts = jnp.split(contents, ends[:-1], axis=1)
    return [
        _write(leaf, blocks, _from_bytes(part, leaf))
        for leaf, part in zip(leaves, parts, strict=True)
    ]


def _as_bytes(values: jax.Array) -> jax.Array:
    num_bytes = values.dtype.itemsize * math.prod(values.shape[1:])
    return jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(values.shape[0], num_bytes)


def _from_bytes(contents: jax.Array, leaf: jax.Array) -> jax.Array:
    """Returns bytes [n, ...] as n blocks of the leaf.

    A value wider than a byte has its bytes along one more axis.
    """
    itemsize = leaf.dtype.itemsize
    width = (itemsize,) if itemsize > 1 else ()
    shape = (contents.shape[0], *leaf.shape[1:], *width)
    return jax.lax.bitcast_convert_type(contents.reshape(shape), leaf.dtype)
