"""Joins tensors into parameters on their devices, so that they do not come to the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpage.checkpoints.fitting import Filled
from jaxpage.layers.parameter import Piece


class _Geometry(NamedTuple):
    """Holds what the program that joins tensors depends on, besides their own shapes.

    Attributes:
        shape: The shape of the parameter.
        dtype: Its type.
        pieces: The pieces that fill it, without their names.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: tuple[Piece, ...]


def are_on_devices(filled: Filled, arrays: Sequence[Any]) -> bool:
    """Returns whether the tensors of a parameter can be joined where they are.

    They are arrays of JAX that this process has whole, and none has to be decoded.
    """
    return all(
        isinstance(array, jax.Array) and array.is_fully_addressable and piece.stored is None
        for (piece, _), array in zip(filled.pieces, arrays, strict=True)
    )


def join_arrays(filled: Filled, arrays: Sequence[jax.Array], dtype: np.dtype[Any]) -> jax.Array:
    """Returns a parameter that shares no memory with the tensors that fill it.

    It is on one of the devices of the first tensor, and is compiled once for all parameters of the
    same shapes.

    Args:
        filled: The parameter.
        arrays: Its tensors, which `are_on_devices`.
        dtype: The type of the parameter.
    """
    device = min(arrays[0].devices(), key=lambda device: device.id)
    pieces = tuple(piece._replace(name="", aliases=()) for piece, _ in filled.pieces)
    local = [_move(array, device) for array in arrays]
    return _join(_Geometry(filled.weight.shape, dtype, pieces), local)


def _move(array: jax.Array, device: jax.Device) -> jax.Array:
    """Returns an array that is on one device alone; it may be the same one.

    From several devices to one JAX would copy it through the host, so each gets all of it first.
    """
    if not array.is_fully_replicated and isinstance(array.sharding, NamedSharding):
        array = _gather(array.sharding.mesh)(array)
    if array.is_fully_replicated:
        shards = array.addressable_shards
        array = next((shard.data for shard in shards if shard.device == device), shards[0].data)
    return jax.device_put(array, device)


@functools.cache
def _gather(mesh: Any) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: array, out_shardings=NamedSharding(mesh, PartitionSpec()))


@functools.partial(jax.jit, static_argnums=0)
def _join(geometry: _Geometry, arrays: list[jax.Array]) -> jax.Array:
    whole = jnp.zeros(geometry.shape, geometry.dtype)
    for piece, array in zip(geometry.pieces, arrays, strict=True):
        part = orient(piece, array).astype(geometry.dtype)
        if piece.shape == geometry.shape:
            # A result that is its argument would share memory with it.
            return jnp.copy(part)
        whole = lax.dynamic_update_slice(whole, part, piece.offset)
    return whole


def split_array(
    whole: jax.Array, boxes: Sequence[Sequence[tuple[slice, ...]]], axis: int, size: int
) -> list[jax.Array]:
    """Returns parts of an array, each joined of boxes along an axis and padded with zeros.

    Args:
        whole: The array.
        boxes: The boxes of each part.
        axis: The axis.
        size: The size of each part along the axis.
    """
    ends = tuple(
        tuple(tuple((along.start, along.stop) for along in box) for box in of_part)
        for of_part in boxes
    )
    return _split(ends, axis, size, whole)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _split(
    boxes: tuple[tuple[tuple[tuple[int, int], ...], ...], ...],
    axis: int,
    size: int,
    whole: jax.Array,
) -> list[jax.Array]:
    parts = []
    for of_part in boxes:
        slices = [lax.slice(whole, *zip(*box, strict=True)) for box in of_part]
        part = jnp.concatenate(slices, axis)
        missing = [(0, size - length if at == axis else 0) for at, length in enumerate(part.shape)]
        parts.append(jnp.pad(part, missing))
    return parts


def orient(piece: Piece, array: Any, others: Sequence[Any] = ()) -> Any:
    """Returns a stored tensor in the shape of its piece: a view, if numpy's need no decoding.

    Args:
        piece: The piece.
        array: The tensor, an array of numpy or JAX.
        others: The tensors that its decoding takes, too.
    """
    array = array.swapaxes(-1, -2) if piece.transpose else array
    array = piece.stored.decode(array, *others) if piece.stored else array
    return (array if piece.rows is None else array[slice(*piece.rows)]).reshape(piece.shape)
