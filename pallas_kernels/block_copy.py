"""Moves whole blocks or slots, in all layers at once; donated pages are changed in place.

The device does not check ids: it clamps a source that is outside the pages, and leaves out such a
destination. The host must check them.
"""

from __future__ import annotations

import operator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt8

from pallas_kernels.kernel_set import Call
from pallas_kernels.sets import first_that_takes

Pages = TypeVar("Pages")  # a pytree of arrays [P, S, ...]


def copy_blocks(
    pages: Pages,
    source: Int[Array, "n"],
    destination: Int[Array, "n"],
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> Pages:
    """Returns pages in which block `destination[i]` holds what `source[i]` held before the call.

    All sources are read before anything is written, so that a block may be a source and a
    destination of the same call. No block may be a destination twice, except for the null block:
    pad with (0, 0).

    Args:
        pages: A pytree of arrays [P, S, ...].
        source: The ids of the blocks to read.
        destination: The ids of the blocks to write.
        backend: One of `BACKENDS`, or "auto": kernels first where JAX's default backend is a GPU.
        interpret: Runs the kernels on CPU, operation by operation; for `INTERPRETABLE_BACKENDS`.

    Raises:
        ValueError: An argument does not fit; the message names it and its value.
        TypeError: An argument has the wrong type.
        NotImplementedError: No backend takes the call; the message has every backend's reason.
    """
    leaves, tree = _flatten(pages, axes=1)
    source, destination = _pairs(source, destination)
    copied = _choose("copy_blocks", backend, interpret, leaves, source, destination)
    return jax.tree.unflatten(tree, copied)


def copy_slots(
    pages: Pages,
    source: Int[Array, "n"],
    destination: Int[Array, "n"],
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> Pages:
    """Copies single slots as `copy_blocks` copies blocks.

    This closes the gaps that refused drafts leave. A slot is named by block * S + offset. All
    leaves have the same P and S.
    """
    leaves, tree = _flatten(pages, axes=2)
    source, destination = _pairs(source, destination)
    copied = _choose("copy_slots", backend, interpret, leaves, source, destination)
    return jax.tree.unflatten(tree, copied)


def gather_blocks(
    pages: Pages, blocks: Int[Array, "n"], *, backend: str = "auto", interpret: bool = False
) -> UInt8[Array, "n block_bytes"]:
    """Returns the contents of blocks in every layer, as bytes in the order of the leaves.

    The result is one array, so one transfer brings it to the host. Backend, interpretation and
    errors are those of `copy_blocks`.
    """
    leaves, _ = _flatten(pages, axes=1)
    blocks = _ids("blocks", blocks)
    return _choose("gather_blocks", backend, interpret, leaves, blocks)


def scatter_blocks(
    pages: Pages,
    blocks: Int[Array, "n"],
    contents: UInt8[Array, "n block_bytes"],
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> Pages:
    """Writes what `gather_blocks` returned into the given blocks, and returns the pages.

    Padding names the null block. Backend, interpretation and errors are those of `copy_blocks`.
    """
    leaves, tree = _flatten(pages, axes=1)
    blocks = _ids("blocks", blocks)
    contents = jnp.asarray(contents)
    block_bytes = sum(leaf.size // leaf.shape[0] * leaf.dtype.itemsize for leaf in leaves)
    if contents.shape != (blocks.shape[0], block_bytes) or contents.dtype != "uint8":
        raise ValueError(
            f"contents must be uint8 {(blocks.shape[0], block_bytes)}, but are {contents.dtype} "
            f"{contents.shape}"
        )
    scattered = _choose("scatter_blocks", backend, interpret, leaves, blocks, contents)
    return jax.tree.unflatten(tree, scattered)


def _choose(operation: str, backend: str, interpret: bool, *arguments: Any) -> Any:
    pick = operator.attrgetter(f"moves.{operation}")
    return first_that_takes(
        operation, pick, *arguments, call=Call(interpret=interpret), backend=backend
    )


def _flatten(pages: Pages, *, axes: int) -> tuple[list[jax.Array], jax.tree_util.PyTreeDef]:
    """Returns the leaves, which must have the same first axes, and the tree that they make."""
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
            f"pages must be alike in their first {axes} axes and not empty, but their shapes are "
            f"{shapes}"
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
    source = _ids("source", source)
    destination = _ids("destination", destination)
    if source.shape != destination.shape:
        raise ValueError(
            f"source and destination must be alike, but are {source.shape} and {destination.shape}"
        )
    return source, destination
