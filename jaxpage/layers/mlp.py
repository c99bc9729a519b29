"""The feed-forward half of a transformer layer is plain or gated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpage.layers.activations import gate
from jaxpage.layers.linear import Linear
from jaxpage.layers.parameter import parameter, tensor


class XIELU(nnx.Module):
    """Computes xIELU, whose curvature is learned (Huang and Schlag, 2024; Apertus).

    Attributes:
        positive: The curvature of positive numbers, before a softplus.
        negative: The curvature of negative numbers, before a softplus and without the slope.
    """

    # The constants beta and epsilon of xIELU, which no checkpoint changes.
    slope: float = 0.5
    epsilon: float = -1e-6

    def __init__(self, *, name: str, dtype: DTypeLike):
        self.positive, self.negative = (
            parameter((1,), axes=(None,), dtype=dtype, sources=[tensor(f"{name}.{part}", 1)])
            for part in ("alpha_p", "alpha_n")
        )

    def __call__(self, x_TF: Float[Array, "T F"]) -> Float[Array, "T F"]:
        """Returns the function's value."""
        positive, negative = (
            jax.nn.softplus(each[...].astype(jnp.float32))[None, :]
            for each in (self.positive, self.negative)
        )
        wide = x_TF.astype(jnp.float32)
        above = positive * wide * wide
        # The minimum keeps the exponential of a large number finite, where the other formula is
        # taken.
        below = (jnp.expm1(jnp.minimum(wide, self.epsilon)) - wide) * (self.slope + negative)
        return (jnp.where(wide > 0, above, below) + self.slope * wide).astype(x_TF.dtype)


class MLP(nnx.Module):
    """Computes `down(activation(up(x)))`.

    Attributes:
        up: The product for the inner layer.
        down: The product for the output.
        activation: The name of the activation function, or one that has parameters.
    """

    def __init__(self, up: Linear, down: Linear, *, activation: str | XIELU):
        self.up = up
        self.down = down
        self.activation = activation

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns the output of the layer."""
        activation = self.activation
        if isinstance(activation, str):
            return self.down(self.up(x_TD, activation))
        return self.down(activation(self.up(x_TD)))


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
        return self.gate_down(self.gate_up(x_TD))

    def gate_down(self, gate_up_TF: Float[Array, "T F2"]) -> Float[Array, "T D"]:
        """Returns the output for these gates and ups."""
        return self.down(gate(gate_up_TF, self.activation))
