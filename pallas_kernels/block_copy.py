"""Moves whole blocks or slots, in all layers at once. Donate the pages and they are changed in place.

Ids are not checked on the device, where a source beyond the pages is clamped and a destination beyond them left out: the host must.
"""

from __future__ import annotations

import operator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt8

from pallas_kernels.kernel_set import Call
from pallas_kernels.sets import first_that_takes

Pages = TypeVar("Pages")  # any pytree of arrays [P, S, ...]


def copy_blocks(
    pages: Pages,
    source: Int[Array, "n"],
    destination: Int[Array, "n"],
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> Pages:
    """Returns a pytree of pages [P, S, ...] in which each block `destination[i]` holds what `source[i]` held before the call.

    All sources are read before anything is written, so that a block may be source and destination of the same call. No block may be
    named as destination twice, but for the null block: pad the two with (0, 0).

    Args:
        backend: one of `BACKENDS`, or "auto": kernels first where JAX's default backend is a GPU.
        interpret: run the kernels on CPU, operation by operation; one of `INTERPRETABLE_BACKENDS`.

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it and its value.
        NotImplementedError: no backend takes the call; the text has every backend's reason.
    """
    leaves, tree = _flattened(pages, axes=1)
    source, destination = _pairs(source, destination)
    copied = _chosen("copy_blocks", backend, interpret, leaves, source, destination)
    return jax.tree.unflatten(tree, copied)


def copy_slots(
    pages: Pages,
    source: Int[Array, "n"],
    destination: Int[Array, "n"],
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> Pages:
    """`copy_blocks` of single slots, each named by block * S + offset: closes the gaps that refused drafts leave. All leaves have the
    same P and S."""
    leaves, tree = _flattened(pages, axes=2)
    source, destination = _pairs(source, destination)
    copied = _chosen("copy_slots", backend, interpret, leaves, source, destination)
    return jax.tree.unflatten(tree, copied)


def gather_blocks(
    pages: Pages, blocks: Int[Array, "n"], *, backend: str = "auto", interpret: bool = False
) -> UInt8[Array, "n block_bytes"]:
    """Returns what the blocks hold in every layer, as bytes in the order of the leaves: one array, so one transfer to the host.

    Backend, interpretation and errors are those of `copy_blocks`.
    """
    leaves, _ = _flattened(pages, axes=1)
    blocks = _ids("blocks", blocks)
    return _chosen("gather_blocks", backend, interpret, leaves, blocks)


def scatter_blocks(
    pages: Pages,
    blocks: Int[Array, "n"],
    contents: UInt8[Array, "n block_bytes"],
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> Pages:
    """Gives block `blocks[i]` what `gather_blocks` made of some block, and returns the pages.

    Padding names the null block. Backend, interpretation and errors are those of `copy_blocks`.
    """
    leaves, tree = _flattened(pages, axes=1)
    blocks, contents = _ids("blocks", blocks), jnp.asarray(contents)
    block_bytes = sum(leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in leaves)
    if contents.shape != (blocks.shape[0], block_bytes) or contents.dtype != "uint8":
        raise ValueError(
            f"contents must be uint8 {(blocks.shape[0], block_bytes)}, but are {contents.dtype} {contents.shape}"
        )
    scattered = _chosen("scatter_blocks", backend, interpret, leaves, blocks, contents)
    return jax.tree.unflatten(tree, scattered)


def _chosen(operation: str, backend: str, interpret: bool, *arguments: Any) -> Any:
    pick = operator.attrgetter(operation)
    return first_that_takes(
        operation, pick, *arguments, call=Call(interpret=interpret), backend=backend
    )


def _flattened(pages: Pages, *, axes: int) -> tuple[list[jax.Array], jax.tree_util.PyTreeDef]:
    """The leaves, which must agree in so many of their first axes, and how they hang together."""
    leaves, tree = jax.tree.flatten(pages)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    if not leaves:
        raise ValueError("pages must have at least one array")
    shapes = [leaf.shape for leaf in leaves]
    if (
        min(map(len, shapes)) < axes
        or any(shape[:axes] != shapes[0][:axes] for shape in shapes)
        or not leaves[0].size
    ):
        raise ValueError(
            f"pages must be alike in their first {axes} axes and not empty, but their shapes are {shapes}"
        )
    for leaf in leaves:
        if not (
            jnp.issubdtype(leaf.dtype, jnp.integer) or jnp.issubdtype(leaf.dtype, jnp.floating)
        ):
            raise TypeError(f"pages must hold integers or floats, but an array holds {leaf.dtype}")
    return leaves, tree


def _ids(name: str, ids: jax.Array) -> jax.Array:
    ids = jnp.asarray(ids)
    if ids.ndim != 1:
        raise ValueError(f"{name} must have one axis, but its shape is {ids.shape}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers, but holds {ids.dtype}")
    return ids.astype(jnp.int32)


def _pairs(source: jax.Array, destination: jax.Array) -> tuple[jax.Array, jax.Array]:
    source, destination = _ids("source", source), _ids("destination", destination)
    if source.shape != destination.shape:
        raise ValueError(
            f"source and destination must be alike, but are {source.shape} and {destination.shape}"
        )
    return source, destination
