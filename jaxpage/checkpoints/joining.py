"""Joins tensors into parameters on their devices, so that they do not come to the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpage.checkpoints.fitting import Filled


class _Geometry(NamedTuple):
    """Holds what the program that joins tensors depends on, besides their own shapes.

    Attributes:
        shape: The shape of the parameter.
        dtype: Its type.
        pieces: The shape, the offset, the transposition and the rows of each piece; see `Piece`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: tuple[tuple[Any, ...], ...]


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

    It is compiled once for all parameters of the same shapes.

    Args:
        filled: The parameter.
        arrays: Its tensors, which `are_on_devices`.
        dtype: The type of the parameter.
    """
    first = arrays[0]
    if any(array.devices() != first.devices() for array in arrays):
        device = next(iter(first.devices()))
        arrays = [jax.device_put(array, device) for array in arrays]
    pieces = tuple(
        (piece.shape, piece.offset, piece.transpose, piece.rows) for piece, _ in filled.pieces
    )
    return _join(_Geometry(filled.weight.shape, dtype, pieces), list(arrays))


@functools.partial(jax.jit, static_argnums=0)
def _join(geometry: _Geometry, arrays: list[jax.Array]) -> jax.Array:
    whole = jnp.zeros(geometry.shape, geometry.dtype)
    for (shape, offset, transpose, rows), array in zip(geometry.pieces, arrays, strict=True):
        part = _orient(array, shape, rows, transpose=transpose).astype(geometry.dtype)
        if shape == geometry.shape:
            # A result that is its argument would share memory with it.
            return jnp.copy(part)
        whole = lax.dynamic_update_slice(whole, part, offset)
    return whole


def _orient(
    array: jax.Array, shape: tuple[int, ...], rows: tuple[int, int] | None, *, transpose: bool
) -> jax.Array:
    """Returns a tensor in the shape of its piece."""
    array = array.swapaxes(-1, -2) if transpose else array
    return (array if rows is None else array[slice(*rows)]).reshape(shape)
