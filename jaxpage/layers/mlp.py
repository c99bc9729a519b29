"""The feed-forward half of a transformer layer is plain or gated."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from jaxpage.layers.activations import ACTIVATIONS, gated
from jaxpage.layers.linear import Linear


class MLP(nnx.Module):
    """Computes `down(activation(up(x)))`."""

    def __init__(self, up: Linear, down: Linear, *, activation: str):
        self.up = up
        self.down = down
        self.activation = activation

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns the output of the layer."""
        return self.down(ACTIVATIONS[self.activation](self.up(x_TD)))


class GatedMLP(nnx.Module):
    """Computes `down(activation(gate(x)) * up(x))` (Shazeer, 2020).

    Attributes:
        gate_up: The product for gates and ups, the gate's columns first.
        down: The product for the output.
        activation: The name of the activation function.
    """

    def __init__(self, gate_up: Linear, down: Linear, *, activation: str):
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns the output of the layer."""
        return self.down(gated(self.gate_up(x_TD), self.activation))
