"""Moves rows (blocks or slots) of all layers with two Triton kernels.

One copies arrays to a staging buffer, the other a staging buffer to arrays:

    gather                                   scatter
    layer 0 k  ..[row]..  --.             .--> layer 0 k  ..[row]..
    layer 0 v  ..[row]..  --+-> staging --+--> layer 0 v  ..[row]..
    layer 1 k  ..[row]..  --'   [n, all]  '--> layer 1 k  ..[row]..

A program moves one tile of one row in every array of the launch, some arrays at once. A copy is a
gather and then a scatter, since no program may write before the others have read. Its staging
buffers have the arrays' type, one buffer for each type, and vectors of 16 bytes go in and out. Data
for the host or from it is bytes, and types wider than a byte are taken apart.
"""

from __future__ import annotations

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernel_set import Leaves
from pallas_kernels.triton import backend
from pallas_kernels.triton.backend import load, store

# The most arrays of a launch: each takes two pointers of the 4 KiB that parameters may have.
MAX_ARRAYS = 128
IN_FLIGHT = 16  # a program loads the tiles of so many arrays before it stores: 4 registers each
TILE_BYTES = 32 * 16  # a program moves at most as much of an array as a warp loads at once


def copy_blocks(
    leaves: Leaves, source: jax.Array, destination: jax.Array, *, interpret: bool = False
) -> Leaves:
    """Copies blocks of all leaves; see `pallas_kernels.copy_blocks`."""
    return _copy_rows(leaves, [leaf.shape[0] for leaf in leaves], source, destination, interpret)


def copy_slots(
    leaves: Leaves, source: jax.Array, destination: jax.Array, *, interpret: bool = False
) -> Leaves:
    """Copies slots of all leaves; see `pallas_kernels.copy_slots`."""
    return _copy_rows(
        leaves, [leaf.shape[0] * leaf.shape[1] for leaf in leaves], source, destination, interpret
    )


def gather_blocks(leaves: Leaves, blocks: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Returns the contents of blocks as bytes; see `pallas_kernels.gather_blocks`."""
    flat = [leaf.reshape(leaf.shape[0], -1) for leaf in leaves]
    parts = [_gather(some, blocks, None, jnp.dtype("uint8"), interpret) for some in _batches(flat)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def scatter_blocks(
    leaves: Leaves, blocks: jax.Array, contents: jax.Array, *, interpret: bool = False
) -> Leaves:
    """Writes bytes into blocks; see `pallas_kernels.scatter_blocks`."""
    flat = [leaf.reshape(leaf.shape[0], -1) for leaf in leaves]
    scattered: Leaves = []
    for some in _batches(flat):
        start, end = (_offsets(each, contents.dtype)[-1] for each in (scattered, scattered + some))
        scattered += _scatter(some, None, blocks, contents[:, start:end], interpret)
    return [new.reshape(leaf.shape) for new, leaf in zip(scattered, leaves, strict=True)]


def _copy_rows(
    leaves: Leaves, num_rows: list[int], source: jax.Array, destination: jax.Array, interpret: bool
) -> Leaves:
    # A launch moves arrays of one type, so that no value is taken apart on its way.
    copied = [leaf.reshape(rows, -1) for leaf, rows in zip(leaves, num_rows, strict=True)]
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        for places in _batches([index for index, leaf in enumerate(leaves) if leaf.dtype == dtype]):
            some = [copied[place] for place in places]
            staging = _gather(some, source, destination, dtype, interpret)
            for place, new in zip(
                places, _scatter(some, source, destination, staging, interpret), strict=True
            ):
                copied[place] = new
    return [new.reshape(leaf.shape) for new, leaf in zip(copied, leaves, strict=True)]


def _batches(items: list) -> list[list]:
    return [items[start : start + MAX_ARRAYS] for start in range(0, len(items), MAX_ARRAYS)]


def _offsets(leaves: Leaves, staging_dtype: jnp.dtype) -> list[int]:
    """Returns where in a row of the staging buffer each array begins, and where the row ends."""
    sizes = [
        leaf.size // leaf.shape[0] * leaf.dtype.itemsize // staging_dtype.itemsize
        for leaf in leaves
    ]
    return [0, *itertools.accumulate(sizes)]


def _gather(
    leaves: Leaves,
    source: jax.Array,
    destination: jax.Array | None,
    dtype: jnp.dtype,
    interpret: bool = False,
) -> jax.Array:
    offsets = _offsets(leaves, dtype)
    staging = jax.ShapeDtypeStruct((source.shape[0], offsets[-1]), dtype)
    if 0 in staging.shape:
        return jnp.zeros(staging.shape, dtype)
    num_tiles = _num_tiles(leaves)
    call = backend.kernel_call(
        functools.partial(_gather_kernel, offsets=offsets, num_tiles=num_tiles),
        name="gather_rows",
        grid=(source.shape[0], num_tiles),
        out_shape=staging,
        num_warps=1,
        num_stages=1,
        interpret=interpret,
    )
    return call(source, destination, *leaves)


def _scatter(
    leaves: Leaves,
    source: jax.Array | None,
    destination: jax.Array,
    staging: jax.Array,
    interpret: bool = False,
) -> Leaves:
    if 0 in staging.shape:
        return leaves
    before = 2 if source is None else 3  # operands before the leaves; None does not count
    num_tiles = _num_tiles(leaves)
    call = backend.kernel_call(
        functools.partial(
            _scatter_kernel, offsets=_offsets(leaves, staging.dtype), num_tiles=num_tiles
        ),
        name="scatter_rows",
        grid=(destination.shape[0], num_tiles),
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves],
        input_output_aliases={before + index: index for index in range(len(leaves))},
        num_warps=1,
        num_stages=1,
        interpret=interpret,
    )
    return list(call(source, destination, staging, *leaves))


def _tile(leaf: jax.Array) -> int:
    return min(pl.next_power_of_2(leaf.shape[1]), TILE_BYTES // leaf.dtype.itemsize)


def _num_tiles(leaves: Leaves) -> int:
    return max(pl.cdiv(leaf.shape[1], _tile(leaf)) for leaf in leaves)


def _gather_kernel(source_ref, destination_ref, *refs, offsets: list[int], num_tiles: int):  # type: ignore[no-untyped-def]
    *leaf_refs, staging_ref = refs
    index = pl.program_id(0)
    tile = pl.program_id(1)
    source = load(source_ref.at[index])
    # A pair of a row with itself, such as padding, has nothing to move.
    moves = True if destination_ref is None else source != load(destination_ref.at[index])

    @pl.when(moves)
    def _move() -> None:
        # By definition a source outside the pages is clamped (`xla.move`), and a destination is
        # left out.
        row = jnp.minimum(jnp.maximum(source, 0), leaf_refs[0].shape[0] - 1)
        for some in _in_flight(leaf_refs, offsets, staging_ref):
            columns = [_columns(leaf_ref, tile, num_tiles) for leaf_ref, _ in some]
            read = [
                _bits(load(leaf_ref.at[row, at], mask=mask))
                for (leaf_ref, _), (at, mask) in zip(some, columns, strict=True)
            ]
            for (leaf_ref, offset), (at, mask), values in zip(some, columns, read, strict=True):
                for part, place in enumerate(_stage(leaf_ref, staging_ref, index, offset, at)):
                    words = (values >> (8 * part)).astype(_word(staging_ref))
                    store(place, jax.lax.bitcast_convert_type(words, staging_ref.dtype), mask=mask)


def _scatter_kernel(  # type: ignore[no-untyped-def]
    source_ref, destination_ref, staging_ref, *refs, offsets: list[int], num_tiles: int
):
    leaf_refs = refs[len(refs) // 2 :]  # they alias the first half
    index = pl.program_id(0)
    tile = pl.program_id(1)
    destination = load(destination_ref.at[index])
    moves = (destination >= 0) & (destination < leaf_refs[0].shape[0])
    if source_ref is not None:
        moves &= destination != load(source_ref.at[index])

    @pl.when(moves)
    def _move() -> None:
        for some in _in_flight(leaf_refs, offsets, staging_ref):
            columns = [_columns(leaf_ref, tile, num_tiles) for leaf_ref, _ in some]
            read = [
                [
                    _bits(load(place, mask=mask))
                    for place in _stage(leaf_ref, staging_ref, index, offset, at)
                ]
                for (leaf_ref, offset), (at, mask) in zip(some, columns, strict=True)
            ]
            for (leaf_ref, _), (at, mask), parts in zip(some, columns, read, strict=True):
                words = [
                    values.astype(_word(leaf_ref)) << (8 * part)
                    for part, values in enumerate(parts)
                ]
                values = functools.reduce(operator.or_, words)
                store(
                    leaf_ref.at[destination, at],
                    jax.lax.bitcast_convert_type(values, leaf_ref.dtype),
                    mask=mask,
                )


def _in_flight(leaf_refs, offsets: list[int], staging_ref) -> list[list]:  # type: ignore[no-untyped-def]
    """Returns the arrays in parts; the loads of a part come before the first of its stores.

    The compiler may not move loads past stores, because the arrays may be the same memory.
    """
    leaves = list(zip(leaf_refs, offsets, strict=False))
    widest = max(leaf_ref.dtype.itemsize for leaf_ref in leaf_refs) // staging_ref.dtype.itemsize
    step = max(1, IN_FLIGHT // widest)  # values that are taken apart need more registers
    return [leaves[start : start + step] for start in range(0, len(leaves), step)]


def _columns(leaf_ref, tile: jax.Array, num_tiles: int) -> tuple[jax.Array, jax.Array | None]:  # type: ignore[no-untyped-def]
    """Returns a program's part of a row, and the mask of the columns that exist."""
    length = _tile(leaf_ref)
    width = leaf_ref.shape[1]
    columns = tile * length + jnp.arange(length)
    return columns, None if num_tiles * length == width else columns < width


def _stage(leaf_ref, staging_ref, index: jax.Array, offset: int, columns: jax.Array) -> list:  # type: ignore[no-untyped-def]
    """Returns where these columns are in the staging buffer, the lowest bits of each first."""
    parts = leaf_ref.dtype.itemsize // staging_ref.dtype.itemsize
    return [staging_ref.at[index, offset + columns * parts + part] for part in range(parts)]


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, _word(values))


def _word(array) -> jnp.dtype:  # type: ignore[no-untyped-def]
    """Returns the unsigned integers as wide as an array's or a ref's type."""
    return jnp.dtype(f"uint{8 * array.dtype.itemsize}")
