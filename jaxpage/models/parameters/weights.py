"""Lists a model's weights, as its modules declare them, for counting and loading."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
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
    def tensor_names(self) -> set[str]:
        """Returns all names that a checkpoint may have for its tensors."""
        return {name for source in self.sources for piece in source.pieces for name in piece.names}

    @property
    def size(self) -> int:
        """Returns how many numbers the parameter has."""
        return math.prod(self.shape)


def weights_of(
    module: nnx.Module, others: Callable[[str], Iterable[str]] = lambda _: ()
) -> list[Weight]:
    """Returns every parameter of a module that a checkpoint has.

    Args:
        module: The module.
        others: Gives the other names that a tensor may have in a checkpoint.
    """
    weights = []
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        metadata = variable.get_metadata()
        struct = variable.get_value()
        if found_sources := sources_of(variable):
            dtype_rule = (
                struct.dtype.name
                if metadata["keeps_dtype"] or struct.dtype.name not in FLOATS
                else None
            )
            sources = tuple(_with_names(others, source) for source in found_sources)
            weights.append(
                Weight(
                    cast("tuple[str | int, ...]", path),
                    struct.shape,
                    metadata["axes"],
                    sources,
                    dtype_rule,
                )
            )
    return weights


def num_bytes(weights: Iterable[Weight], dtype: str) -> int:
    """Returns the bytes of all weights, in a model of this type."""
    return sum(weight.size * jnp.dtype(weight.dtype or dtype).itemsize for weight in weights)


def _with_names(others: Callable[[str], Iterable[str]], source: Source) -> Source:
    pieces = []
    for piece in source.pieces:
        names = [other for name in piece.names for other in others(name)]
        pieces.append(piece._replace(aliases=(*names, *piece.aliases)))
    return replace(source, pieces=tuple(pieces))
