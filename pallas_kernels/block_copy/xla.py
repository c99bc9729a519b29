"""The definition: a gather and a scatter for each array."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8

Leaves = list[jax.Array]  # each [P, S, ...]


def copy_blocks(leaves: Leaves, source: Int[Array, "n"], destination: Int[Array, "n"]) -> Leaves:
    return [leaf.at[destination].set(leaf[source], mode="drop") for leaf in leaves]


def copy_slots(leaves: Leaves, source: Int[Array, "n"], destination: Int[Array, "n"]) -> Leaves:
    # By two indices: of a reshaped array that is read and then written, XLA makes a copy of the whole.
    return [leaf.at[_place(leaf, destination)].set(leaf[_place(leaf, source)], mode="drop") for leaf in leaves]


def _place(leaf: jax.Array, slots: Int[Array, "n"]) -> tuple[jax.Array, jax.Array]:
    return slots // leaf.shape[1], slots % leaf.shape[1]


def gather_blocks(leaves: Leaves, blocks: Int[Array, "n"]) -> UInt8[Array, "n block_bytes"]:
    return jnp.concatenate([_as_bytes(leaf[blocks]) for leaf in leaves], axis=1)


def scatter_blocks(leaves: Leaves, blocks: Int[Array, "n"], contents: UInt8[Array, "n block_bytes"]) -> Leaves:
    ends = np.cumsum([leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in leaves])
    parts = jnp.split(contents, ends[:-1], axis=1)
    return [leaf.at[blocks].set(_from_bytes(part, leaf), mode="drop") for leaf, part in zip(leaves, parts, strict=True)]


def _as_bytes(values: jax.Array) -> jax.Array:
    num_bytes = values.dtype.itemsize * math.prod(values.shape[1:])
    return jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(values.shape[0], num_bytes)


def _from_bytes(contents: jax.Array, leaf: jax.Array) -> jax.Array:
    """Bytes [n, ...] as n blocks of the leaf. Values wider than a byte are bytes along one more axis."""
    itemsize = leaf.dtype.itemsize
    width = (itemsize,) if itemsize > 1 else ()
    shape = (contents.shape[0], *leaf.shape[1:], *width)
    return jax.lax.bitcast_convert_type(contents.reshape(shape), leaf.dtype)
