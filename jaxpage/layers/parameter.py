"""How a module declares a parameter: its shape, its axes by name, and the tensors of the checkpoint that fill it.

A module holds shapes, no numbers: nothing is allocated when it is made. The numbers come with `nnx.merge`.
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
# A fused axis lists its parts in order, each with its size: (("heads", 256), ("kv_heads", 64),
# ("kv_heads", 64)).
Axis = str | None | tuple[tuple[str | None, int], ...]


@dataclass(frozen=True)
class Stored:
    """A tensor that has to be decoded, or checked, before it fills a part of a parameter.

    dtypes: the types that it may have, as numpy names them.
    decode: turns its numbers (transposed, where the piece says so) into the part's.
    check: says what is wrong with its numbers, or None. It is asked before anything is loaded.
    beside: names of pieces of the same parameter whose numbers `decode` gets after its own; they fill nothing themselves.
    """

    dtypes: tuple[str, ...]
    decode: Callable[..., np.ndarray] = lambda array: array
    check: Callable[[np.ndarray], str | None] | None = None
    beside: tuple[str, ...] = ()


class Piece(NamedTuple):
    """A tensor of the checkpoint, and the part of a parameter that it fills.

    stored_shape: in the checkpoint. transpose: its last two axes are exchanged in the part (GPT-2's Conv1D).
    rows: from which row up to which it is taken, after the transposition, where the tensor holds several parameters. None: all.
    shape, offset: of the part and where it begins; they have the parameter's rank.
    aliases: other names for the same tensor. If a checkpoint has several of them, they must hold the same numbers.
    stored: how the tensor becomes the part, where it is not simply its numbers.
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
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class Source:
    """One way to fill a parameter of this shape: pieces that cover it without overlap."""

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
    """Returns the source that is one tensor of this shape, its transpose, or rows of it (see `Piece`)."""
    filled = (*shape[:-2], *shape[:-3:-1]) if transpose else shape
    if rows is not None:
        filled = (rows[1] - rows[0], *filled[1:])
    return Source(
        filled, (Piece(name, shape, filled, (0,) * len(filled), transpose, rows, aliases, stored),)
    )


def concatenate(sources: Sequence[Source], axis: int = 0) -> Source:
    """Joins sources along an axis that exists, as fused products need it."""
    shape, pieces = list(sources[0].shape), []
    shape[axis] = 0
    for source in sources:
        for piece in source.pieces:
            offset = list(piece.offset)
            offset[axis] += shape[axis]
            pieces.append(piece._replace(offset=tuple(offset)))
        shape[axis] += source.shape[axis]
    return Source(tuple(shape), tuple(pieces))


def stack(sources: Sequence[Source]) -> Source:
    """Joins sources along a new first axis, as the experts of a mixture need it."""
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
    """Declares a parameter. Its metadata are `axes`, `sources` and `keeps_dtype`.

    axes: a name of `AXES`, the parts of a fused axis, or None, for each axis; a name stands once.
    sources: the ways to fill it; the first of which the checkpoint has all tensors is taken. None: it is no checkpoint's. A function:
        of what is long, and only made for a checkpoint (`sources_of`).
    keeps_dtype: whether it has this type in a model of any; integers always do.
    Raises ValueError for a declaration that contradicts itself.
    """
    parts = [
        axis if isinstance(axis, tuple) else ((axis, size),)
        for axis, size in zip(axes, shape, strict=True)
    ]
    names = [name for axis in parts for name in {name for name, _ in axis} - {None}]
    if unknown := set(names) - AXES.keys():
        raise ValueError(f"axes {sorted(map(str, unknown))} are not among {', '.join(AXES)}")
    if len(names) != len(set(names)):
        raise ValueError(f"axes {axes}: a name stands for one axis")
    if tuple(sum(size for _, size in axis) for axis in parts) != shape:
        raise ValueError(f"axes {axes} do not add up to {shape}")
    if not callable(sources):
        sources = _checked(sources, shape)
    struct = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return nnx.Param(cast(jax.Array, struct), axes=axes, sources=sources, keeps_dtype=keeps_dtype)


def sources_of(variable: nnx.Variable[Any]) -> tuple[Source, ...]:
    """Returns the sources of a parameter that `parameter` has declared. Raises ValueError for those that do not fill it."""
    sources = variable.get_metadata()["sources"]
    return _checked(sources(), variable.get_value().shape) if callable(sources) else sources


def _checked(sources: Sequence[Source], shape: tuple[int, ...]) -> tuple[Source, ...]:
    for source in sources:
        if source.shape != shape or sum(
            math.prod(piece.shape) for piece in source.pieces
        ) != math.prod(shape):
            raise ValueError(
                f"{[piece.name for piece in source.pieces]} make {source.shape}, the parameter is {shape}"
            )
    return tuple(sources)
