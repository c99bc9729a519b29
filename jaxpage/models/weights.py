"""Lists a model's weights, as its modules declare them, for counting and loading."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

import jax.numpy as jnp
from flax import nnx

from jaxpage.layers.parameter import Axis, Source, sources_of

FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Weight:
    """Describes one parameter of a model.

    Attributes:
        path: The keys of the parameter in the nested dict of `models.base.abstract`; list indices
            are integers.
        shape: The shape.
        axes: See `layers.parameter.parameter`.
        sources: See `layers.parameter.parameter`.
        dtype: The type, if the parameter has one of its own; None for the model's.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    sources: tuple[Source, ...]
    dtype: str | None = None

    @property
    def size(self) -> int:
        """Returns how many numbers the parameter has."""
        return math.prod(self.shape)


def weights_of(module: nnx.Module, prefix: str | tuple[str, ...] = "") -> list[Weight]:
    """Returns every parameter of a module that a checkpoint has.

    Args:
        module: The module.
        prefix: The prefix of names in the checkpoint. Each name is accepted without it too, because
            files that were saved from the headless model lack it. Several prefixes are those that
            files may have, the modules' first.
    """
    found = []
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        metadata = variable.get_metadata()
        struct = variable.get_value()
        if found_sources := sources_of(variable):
            own = (
                struct.dtype.name
                if metadata["keeps_dtype"] or struct.dtype.name not in FLOATS
                else None
            )
            sources = tuple(_also_without(prefix, source) for source in found_sources)
            found.append(
                Weight(
                    cast("tuple[str | int, ...]", path),
                    struct.shape,
                    metadata["axes"],
                    sources,
                    own,
                )
            )
    return found


def num_bytes(weights: Iterable[Weight], dtype: str) -> int:
    """Returns the bytes of all weights, in a model of this type."""
    return sum(weight.size * jnp.dtype(weight.dtype or dtype).itemsize for weight in weights)


def other_names(name: str, prefix: str | tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names that files may have in the place of one; see `weights_of`."""
    own, *others = (prefix,) if isinstance(prefix, str) else prefix
    if not own or not name.startswith(own):
        return ()
    stem = name.removeprefix(own)
    return (stem, *(f"{other}{stem}" for other in others))


def _also_without(prefix: str | tuple[str, ...], source: Source) -> Source:
    pieces = (
        piece._replace(aliases=(*other_names(piece.name, prefix), *piece.aliases))
        for piece in source.pieces
    )
    return replace(source, pieces=tuple(pieces))
