"""The feed-forward half of a transformer layer, plain and gated."""

from __future__ import annotations

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpage.layers.activations import ACTIVATIONS
from jaxpage.layers.linear import Linear


class MLP(nnx.Module):
    """`down(activation(up(x)))`."""

    def __init__(self, width: int, feed_forward_width: int, *, activation: str, bias: bool, dtype: DTypeLike):
        self.up = Linear(width, feed_forward_width, bias=bias, dtype=dtype)
        self.down = Linear(feed_forward_width, width, bias=bias, dtype=dtype)
        self.activation = activation

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(ACTIVATIONS[self.activation](self.up(x_TD)))


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))` (Shazeer, 2020)."""

    def __init__(self, width: int, feed_forward_width: int, *, activation: str, bias: bool, dtype: DTypeLike):
        self.gate = Linear(width, feed_forward_width, bias=bias, dtype=dtype)
        self.up = Linear(width, feed_forward_width, bias=bias, dtype=dtype)
        self.down = Linear(feed_forward_width, width, bias=bias, dtype=dtype)
        self.activation = activation

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(ACTIVATIONS[self.activation](self.gate(x_TD)) * self.up(x_TD))
