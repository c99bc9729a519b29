"""Makes a linear layer with its names in a checkpoint."""

from __future__ import annotations

from dataclasses import replace

from jaxpage.layers.linear import Linear, Part, linear
from jaxpage.models.parts.names import Scope


def projection(
    num_in: int,
    at: Scope,
    *parts: tuple[str, int],
    axes: tuple[str | None, str | None] = ("embed", "heads"),
    bias: bool = False,
    each: tuple[int, ...] = (),
) -> Linear:
    """Returns a linear layer whose outputs are those of one or several layers of the checkpoint.

    Args:
        num_in: The width of the input.
        at: The scope of the module that has these layers.
        *parts: The name and the number of outputs of each of them.
        axes: The axes of the input and of the outputs.
        bias: True if they have biases.
        each: See `Part`, for the first one.
    """
    made = [Part(rows, axes[1], (at / name).name) for name, rows in parts]
    made[0] = replace(made[0], each=each)
    return linear(num_in, *made, input_axis=axes[0], bias=bias, dtype=at.dtype)
