"""Defines the encoders of pictures, whose outputs stand for tokens in a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float

PictureArrays = Mapping[str, np.typing.NDArray[Any]]  # a picture, as its processor made it


class VisionCall(NamedTuple):
    """Describes one call of an encoder: a tile of a picture, or a whole picture.

    Attributes:
        size: The number of patches of the executable, one of `VisionConfig.sizes`.
        make_inputs: Returns the arrays, padded to this size. Who counts rows needs none.
        num_rows: The number of leading rows of the result that count.
    """

    size: int
    make_inputs: Callable[[], dict[str, np.typing.NDArray[Any]]]
    num_rows: int


@runtime_checkable
class VisionModel(Protocol):
    """The module of an encoder, which is compiled for each size."""

    @staticmethod
    def calls(spec: Any, arrays: PictureArrays) -> Sequence[VisionCall]:
        """Returns the calls that encode a picture, whose rows follow each other."""
        ...

    @staticmethod
    def input_shapes(spec: Any, size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and types of the inputs of one size."""
        ...

    def __call__(self, inputs: Mapping[str, jax.Array]) -> Float[Array, "R 1+n D"]:
        """Returns a row for each position that the picture fills.

        The first vector of a row is the input of the text model's first layer; the other ones are
        added to the outputs of its first layers (DeepStack).
        """
        ...


@runtime_checkable
class VisionFamily(Protocol):
    """Describes the encoder of a family, which is the family's attribute `Vision`.

    The other attributes are those of `models.base.Family`. The model of a family whose prompts have
    rotary positions on several axes has a static method `axes_of(spec, token_ids, pictures)`, too.
    """

    Spec: Any  # `from_config` reads the whole config.json and returns a `VisionConfig`
    prefix: str | tuple[str, ...]
    ignored: tuple[str, ...]

    def Model(self, spec: Any, *, dtype: jax.typing.DTypeLike) -> VisionModel:
        """Returns the module, whose parameters have this type."""
        ...
