"""Computes the state space layer of Mamba 2 (Dao and Gu, 2024).

A matrix S for each head takes the place of the keys and values of all tokens. A token with the
input x, the time step t, and the vectors B and C, which heads of a group share, lets the matrix
decay, adds to it, and reads it:

    S = exp(-rate * t) * S + B (t * x)^T
    out = S^T C + D * x

Inputs and vectors come from a short causal convolution over the tokens' inputs. In transformers and
in Mamba's own kernels prompts are computed in chunks, in another order of sums than decoding; here
there is one order, token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpage.layers.activations import ACTIVATIONS
from jaxpage.layers.context import ForwardContext, LayerPages, Recurrence, StateSpec
from jaxpage.layers.convolution import short_convolution
from jaxpage.layers.linear import Linear
from jaxpage.layers.norms import RMSNorm
from jaxpage.layers.parameter import Axis, parameter, tensor
from jaxpage.layers.state_update import update_state


@dataclass(frozen=True)
class MambaSpec:
    """Describes a layer of Mamba 2.

    Attributes:
        heads: The number of heads.
        head: The width of a head.
        groups: The number of groups of heads; those of a group share the vectors B and C.
        vector: The width of B and of C.
        kernel: The number of tokens that the convolution spans.
        activation: The name of the function after the convolution.
        time_steps: The least and the largest time step.
        convolution_bias: True if the convolution has a bias.
        input_bias: True if the product for the input has a bias.
        output_bias: True if the product for the output has a bias.
        norm: "gated" if the norm is over the gated output, "first" if the gates come after it,
            "none" if there is no norm.
        factors: The factors of gates, inputs, vectors B, vectors C and time steps, as they come out
            of the product; empty if there are none.
    """

    heads: int
    head: int
    groups: int
    vector: int
    kernel: int
    activation: str = "silu"
    time_steps: tuple[float, float] = (0.0, float("inf"))
    convolution_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    norm: str = "gated"
    factors: tuple[float, ...] = ()

    @property
    def inner(self) -> int:
        """Returns the width of the inputs of all heads."""
        return self.heads * self.head

    @property
    def vectors(self) -> int:
        """Returns the width of the vectors B of all groups, and of the vectors C."""
        return self.groups * self.vector

    @property
    def convolution_width(self) -> int:
        """Returns the width of the convolution: inputs, vectors B and vectors C."""
        return self.inner + 2 * self.vectors

    @property
    def parts(self) -> tuple[int, ...]:
        """Returns the widths of gates, inputs, vectors B, vectors C and time steps."""
        return self.inner, self.inner, self.vectors, self.vectors, self.heads

    @property
    def state(self) -> StateSpec:
        """Returns the shapes of the state: a matrix for each head.

        The input of a token has the numbers that are convolved, and the time step of each head.
        """
        shape = (self.heads, self.vector, self.head)
        return StateSpec(shape, self.convolution_width + self.heads, self.kernel - 1)


class Mamba2(nnx.Module):
    """Changes its state by a scan, and gates its output.

    Attributes:
        layer_index: The layer of the cache that has its states; see `Attend`.
        spec: The description of the layer.
        input: The product for gates, then for what is convolved, then for time steps.
        norm: The norm, in groups, or None.
        output: The product for the output.
        convolution: The kernel of the convolution.
        convolution_bias: The bias of the convolution, or None.
        rate: The logarithm of each head's rate of decay.
        time_step_bias: The bias of each head's time step.
        skip: The factor of each head's input in its output (D).
    """

    def __init__(
        self,
        layer_index: int,
        spec: MambaSpec,
        input: Linear,
        norm: RMSNorm | None,
        output: Linear,
        *,
        name: str,
        dtype: DTypeLike,
    ):
        self.layer_index = layer_index
        self.spec = spec
        self.input = input
        self.norm = norm
        self.output = output

        def declare(part: str, axis: Axis, *shape: int) -> nnx.Param[jax.Array]:
            axes = (axis, *(None,) * (len(shape) - 1))
            return parameter(
                shape, axes=axes, dtype=dtype, sources=[tensor(f"{name}.{part}", *shape)]
            )

        width = spec.convolution_width
        self.convolution = declare("conv1d.weight", None, width, 1, spec.kernel)
        self.convolution_bias = (
            declare("conv1d.bias", None, width) if spec.convolution_bias else None
        )
        self.rate = declare("A_log", "heads", spec.heads)
        self.time_step_bias = declare("dt_bias", "heads", spec.heads)
        self.skip = declare("D", "heads", spec.heads)

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages."""
        spec = self.spec
        projected = self.input(x_TD)
        if spec.factors:
            factors = jnp.repeat(
                jnp.array(spec.factors, projected.dtype),
                jnp.array(spec.parts),
                total_repeat_length=sum(spec.parts),  # a trace needs a length that is known
            )
            projected = projected * factors[None]
        gate, input_TE = jnp.split(projected, [spec.inner], axis=1)
        recurrence = Recurrence(self._prepare, self._update, spec.state)
        out, layer_pages = context.recur(self.layer_index, input_TE, recurrence, layer_pages)
        out = out.astype(x_TD.dtype).astype(jnp.float32)
        gate = jax.nn.silu(gate.astype(jnp.float32))
        if self.norm is None:
            out = out * gate
        else:
            out = self.norm(out) * gate if spec.norm == "first" else self.norm(out * gate)
        return self.output(out.astype(x_TD.dtype)), layer_pages

    def _prepare(self, inputs_BWE: Float[Array, "B W E"]) -> tuple[jax.Array, ...]:
        """Returns a token's x, time step, decay, B and C for each head, in float32."""
        spec = self.spec
        inputs_BWE = inputs_BWE.astype(jnp.float32)
        bias_C = None if self.convolution_bias is None else self.convolution_bias[...]
        mixed_BC = short_convolution(
            inputs_BWE[..., : spec.convolution_width], self.convolution[...], bias_C
        )
        x, in_vector, out_vector = jnp.split(
            ACTIVATIONS[spec.activation](mixed_BC),
            [spec.inner, spec.inner + spec.vectors],
            axis=-1,
        )

        def of_heads(vector: jax.Array) -> jax.Array:
            vector = vector.reshape(-1, spec.groups, spec.vector)
            return jnp.repeat(vector, spec.heads // spec.groups, axis=1)

        rate_1N, bias_1N = (
            each[...].astype(jnp.float32)[None] for each in (self.rate, self.time_step_bias)
        )
        time_step_BN = jax.nn.softplus(inputs_BWE[:, -1, spec.convolution_width :] + bias_1N)
        if spec.time_steps != (0.0, float("inf")):
            time_step_BN = jnp.clip(time_step_BN, *spec.time_steps)
        decay_BN = jnp.exp(-jnp.exp(rate_1N) * time_step_BN)
        x_BNH = x.reshape(-1, spec.heads, spec.head)
        return x_BNH, time_step_BN, decay_BN, of_heads(in_vector), of_heads(out_vector)

    def _update(
        self, state_BNVH: Float[Array, "B N V H"], prepared: tuple[jax.Array, ...]
    ) -> tuple[Float[Array, "B N V H"], Float[Array, "B _"]]:
        x_BNH, time_step_BN, decay_BN, in_BNV, out_BNV = prepared
        added_BNH = x_BNH * time_step_BN[..., None]
        state_BNVH, out_BNH = update_state(
            state_BNVH, decay_BN[..., None, None], in_BNV, added_BNH, out_BNV
        )
        skip_1N1 = self.skip[...].astype(jnp.float32)[None, :, None]
        return state_BNVH, (out_BNH + skip_1N1 * x_BNH).reshape(len(x_BNH), -1)
