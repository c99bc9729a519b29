"""Declares a parameter: its shape, its axes by name, and the checkpoint tensors that fill it.

A module holds shapes and no numbers: nothing is allocated when it is made. The numbers come with
`nnx.merge`. A fused parameter is filled piece by piece:

    tensors   q_proj.weight [256, 64]    k_proj.weight [64, 64]    v_proj.weight [64, 64]
    pieces    offset (0, 0)              offset (256, 0)           offset (320, 0)
    kernel    [384, 64] with the axes (("heads", 256), ("kv_heads", 64), ("kv_heads", 64)), "embed"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

# The axes that a mesh of devices may divide. An axis without a name (None) is never divided.
AXES = {
    "vocab": "token ids",
    "embed": "the hidden state",
    "heads": "query heads, each as wide as a head",
    "kv_heads": "key/value heads, each as wide as a head",
    "ffn": "the inner width of a feed-forward layer",
    "expert": "the experts of a mixture",
}
# A fused axis lists its parts in order, each with its size, for example (("heads", 256),
# ("kv_heads", 64), ("kv_heads", 64)).
Axis = str | None | tuple[tuple[str | None, int], ...]


@dataclass(frozen=True)
class Stored:
    """Describes how a tensor is decoded, or checked, before it fills a part of a parameter.

    Attributes:
        dtypes: The types that the tensor may have, as numpy names them.
        decode: Turns its numbers (transposed, where the piece says so) into those of the part.
        check: Says what is wrong with its numbers, or returns None. It is called before anything is
            loaded.
        beside: The names of pieces of the same parameter whose numbers `decode` gets after the
            tensor's own; these pieces fill nothing themselves.
    """

    dtypes: tuple[str, ...]
    decode: Callable[..., np.ndarray] = lambda array: array
    check: Callable[[np.ndarray], str | None] | None = None
    beside: tuple[str, ...] = ()


class Piece(NamedTuple):
    """Names a tensor of the checkpoint, and the part of a parameter that it fills.

    Attributes:
        name: The name of the tensor.
        stored_shape: The shape of the tensor in the checkpoint.
        shape: The shape of the part; it has the rank of the parameter.
        offset: The place in the parameter where the part begins.
        transpose: True if the last two axes are exchanged in the part (GPT-2's Conv1D).
        rows: The first row and the end of the rows that are taken, after the transposition, where
            the tensor holds several parameters; None for all rows.
        aliases: Other names of the tensor. If a checkpoint has several of them, they must hold the
            same numbers.
        stored: The decoding of the tensor; None if its numbers are those of the part.
    """

    name: str
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    transpose: bool = False
    rows: tuple[int, int] | None = None
    aliases: tuple[str, ...] = ()
    stored: Stored | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the name and its aliases."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class Source:
    """Describes one way to fill a parameter of this shape: pieces that cover it without overlap."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def tensor(
    name: str,
    *shape: int,
    transpose: bool = False,
    rows: tuple[int, int] | None = None,
    aliases: tuple[str, ...] = (),
    stored: Stored | None = None,
) -> Source:
    """Returns the source that is one tensor of this shape, its transpose, or rows of it.

    See `Piece` for the arguments.
    """
    filled = (*shape[:-2], *shape[:-3:-1]) if transpose else shape
    if rows is not None:
        filled = (rows[1] - rows[0], *filled[1:])
    return Source(
        filled, (Piece(name, shape, filled, (0,) * len(filled), transpose, rows, aliases, stored),)
    )


def concatenate(sources: Sequence[Source], axis: int = 0) -> Source:
    """Joins sources along an axis that they have, for fused products."""
    shape = list(sources[0].shape)
    pieces = []
    shape[axis] = 0
    for source in sources:
        for piece in source.pieces:
            offset = list(piece.offset)
            offset[axis] += shape[axis]
            pieces.append(piece._replace(offset=tuple(offset)))
        shape[axis] += source.shape[axis]
    return Source(tuple(shape), tuple(pieces))


def stack(sources: Sequence[Source]) -> Source:
    """Joins sources along a new first axis, for the experts of a mixture."""
    pieces = [
        piece._replace(shape=(1, *piece.shape), offset=(index, *piece.offset))
        for index, source in enumerate(sources)
        for piece in source.pieces
    ]
    return Source((len(sources), *sources[0].shape), tuple(pieces))


def parameter(
    shape: tuple[int, ...],
    *,
    axes: tuple[Axis, ...],
    dtype: DTypeLike,
    sources: Sequence[Source] | Callable[[], Sequence[Source]] = (),
    keeps_dtype: bool = False,
) -> nnx.Param[jax.Array]:
    """Declares a parameter whose metadata are `axes`, `sources` and `keeps_dtype`.

    Args:
        shape: The shape.
        axes: For each axis a name of `AXES`, the parts of a fused axis, or None. No two axes have
            the same name.
        dtype: The type.
        sources: The ways to fill the parameter, of which the first is taken whose tensors are all
            in the checkpoint; empty for a parameter that no checkpoint fills. A function may return
            them instead: it is called only when a checkpoint is opened (`sources_of`).
        keeps_dtype: True if the parameter has this type in a model of any type; integers always
            keep theirs.

    Raises:
        ValueError: The declaration contradicts itself.
    """
    parts = [
        axis if isinstance(axis, tuple) else ((axis, size),)
        for axis, size in zip(axes, shape, strict=True)
    ]
    # Parts of one axis may share a name, as keys and values do; two axes may not.
    names = [name for axis in parts for name in {name for name, _ in axis} - {None}]
    if unknown := set(names) - AXES.keys():
        raise ValueError(f"axes {sorted(map(str, unknown))} are not among {', '.join(AXES)}")
    if len(names) != len(set(names)):
        raise ValueError(f"axes {axes}: a name stands for one axis")
    if tuple(sum(size for _, size in axis) for axis in parts) != shape:
        raise ValueError(f"axes {axes} do not add up to {shape}")
    if not callable(sources):
        sources = _check(sources, shape)
    # A shape in place of numbers, so that a model of any size is made without memory.
    struct = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return nnx.Param(cast(jax.Array, struct), axes=axes, sources=sources, keeps_dtype=keeps_dtype)


def sources_of(variable: nnx.Variable[Any]) -> tuple[Source, ...]:
    """Returns the sources of a parameter that `parameter` has declared.

    Raises:
        ValueError: A source does not fill the parameter.
    """
    sources = variable.get_metadata()["sources"]
    return _check(sources(), variable.get_value().shape) if callable(sources) else sources


def _check(sources: Sequence[Source], shape: tuple[int, ...]) -> tuple[Source, ...]:
    for source in sources:
        # The sizes are enough: the functions that make sources never let pieces overlap.
        if source.shape != shape or sum(
            math.prod(piece.shape) for piece in source.pieces
        ) != math.prod(shape):
            raise ValueError(
                f"{[piece.name for piece in source.pieces]} make {source.shape}, the parameter is "
                f"{shape}"
            )
    return tuple(sources)
