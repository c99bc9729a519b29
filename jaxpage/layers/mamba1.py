"""Computes the state space layer of Mamba (Gu and Dao, 2023), the selective scan.

Each channel keeps a vector, its part of a matrix S. A token with the input x, which a short causal
convolution has mixed with those of earlier tokens, lets the matrix decay, adds to it, and reads it;
the time step t of each channel, and the vectors B and C, are products of x:

    S = exp(-rate * t) * S + B (t * x)^T
    out = S^T C + D * x

Rates differ in all numbers of the matrix; in Mamba 2 only heads have theirs. A layer has two layers
of the cache: the states, whose inputs are x, t, B and C, and the inputs of the convolution. So a
step computes the products for all of its tokens together. Only the scan is token by token, in one
order for prompts and for decoding.
"""

from __future__ import annotations

import functools
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
from jaxpage.layers.parameter import parameter, tensor
from jaxpage.layers.state_update import update_state


@dataclass(frozen=True)
class Mamba1Spec:
    """Describes a layer of Mamba.

    Attributes:
        inner: The number of channels.
        vector: The width of B and of C.
        rank: The rank of the product for the time steps.
        kernel: The number of tokens that the convolution spans.
        activation: The name of the function after the convolution.
        convolution_bias: True if the convolution has a bias.
        bias: True if the products for the input and for the output have biases.
        normed: True if the ranks of time steps, B and C have norms.
        plain_epsilon: The epsilon of these norms if they have no scales; None if they have.
    """

    inner: int
    vector: int
    rank: int
    kernel: int
    activation: str = "silu"
    convolution_bias: bool = True
    bias: bool = False
    normed: bool = True
    plain_epsilon: float | None = None

    @property
    def state(self) -> StateSpec:
        """Returns the shapes of the state; the input of a token has x, time steps, B and C."""
        # The inputs have gone through the convolution, so an update looks back at none.
        return StateSpec((1, self.vector, self.inner), 2 * (self.inner + self.vector), 0)

    @property
    def convolution_state(self) -> StateSpec:
        """Returns what the convolution keeps: the channels of each token, and no state."""
        return StateSpec(None, self.inner, self.kernel - 1)


class Mamba1(nnx.Module):
    """Convolves its input, changes its state by a scan, and gates its output.

    Attributes:
        layer_index: The layer of the cache that has its states; see `Attend`.
        convolution_index: The place of the convolution's inputs, which the model decides.
        spec: The description of the layer.
        input: The product for what is convolved, then for gates.
        vectors: The product for the ranks of time steps, for B and for C.
        norms: The norms of these three, or None.
        time_steps: The product for the time steps.
        output: The product for the output.
        convolution: The kernel of the convolution.
        convolution_bias: The bias of the convolution, or None.
        rate: The logarithms of the rates of decay.
        time_step_bias: The bias of each channel's time step.
        skip: The factor of each channel's input in its output (D).
    """

    def __init__(
        self,
        layer_index: int,
        spec: Mamba1Spec,
        *,
        input: Linear,
        vectors: Linear,
        norms: tuple[RMSNorm, RMSNorm, RMSNorm] | None,
        time_steps: Linear,
        output: Linear,
        name: str,
        dtype: DTypeLike,
    ):
        self.layer_index = layer_index
        # Until the model gives it a number of its own: it is a second layer of the cache.
        self.convolution_index = layer_index
        self.spec = spec
        self.input = input
        self.vectors = vectors
        self.norms = None if norms is None else nnx.List(norms)
        self.time_steps = time_steps
        self.output = output

        def declare(part: str, *shape: int) -> nnx.Param[jax.Array]:
            source = tensor(f"{name}.{part}", *shape)
            return parameter(shape, axes=(None,) * len(shape), dtype=dtype, sources=[source])

        self.convolution = declare("conv1d.weight", spec.inner, 1, spec.kernel)
        self.convolution_bias = (
            declare("conv1d.bias", spec.inner) if spec.convolution_bias else None
        )
        self.rate = declare("A_log", spec.inner, spec.vector)
        self.time_step_bias = declare("dt_proj.bias", spec.inner)
        self.skip = declare("D", spec.inner)

    def __call__(
        self,
        x_TD: Float[Array, "T D"],
        layer_pages: tuple[LayerPages, LayerPages],
        context: ForwardContext,
    ) -> tuple[Float[Array, "T D"], tuple[LayerPages, LayerPages]]:
        """Returns the output of the layer, and the pages of states and of the convolution."""
        spec = self.spec
        state_pages, convolution_pages = layer_pages
        x_TE, gate_TE = jnp.split(self.input(x_TD), 2, axis=1)
        recurrence = Recurrence(self._convolve, None, spec.convolution_state)
        x_TE, convolution_pages = context.recur(
            self.convolution_index, x_TE, recurrence, convolution_pages
        )
        x_TE = x_TE.astype(x_TD.dtype)
        parts = jnp.split(self.vectors(x_TE), [spec.rank, spec.rank + spec.vector], axis=1)
        if self.norms is not None:
            parts = [norm(part) for norm, part in zip(self.norms, parts, strict=True)]
        ranks_TR, *vectors = parts
        inputs = jnp.concatenate([x_TE, self.time_steps(ranks_TR), *vectors], axis=1)
        # Here and not in `_prepare`, which runs for each token of a row.
        rate_VE = -jnp.exp(self.rate[...].astype(jnp.float32)).T
        prepare = functools.partial(self._prepare, rate_VE)
        recurrence = Recurrence(prepare, self._update, spec.state)
        out_TE, state_pages = context.recur(self.layer_index, inputs, recurrence, state_pages)
        out_TE = out_TE * jax.nn.silu(gate_TE.astype(jnp.float32))
        return self.output(out_TE.astype(x_TD.dtype)), (state_pages, convolution_pages)

    def _convolve(self, inputs_BWE: Float[Array, "B W E"]) -> Float[Array, "B E"]:
        bias_E = None if self.convolution_bias is None else self.convolution_bias[...]
        mixed_BE = short_convolution(inputs_BWE.astype(jnp.float32), self.convolution[...], bias_E)
        return ACTIVATIONS[self.spec.activation](mixed_BE)

    def _prepare(
        self, rate_VE: Float[Array, "V E"], inputs_B1I: Float[Array, "B 1 I"]
    ) -> tuple[jax.Array, ...]:
        """Returns a token's x, what it adds for each channel, decays, B and C, in float32."""
        inner = self.spec.inner
        x_BE, time_step_BE, in_BV, out_BV = jnp.split(
            inputs_B1I[:, 0].astype(jnp.float32),
            [inner, 2 * inner, 2 * inner + self.spec.vector],
            axis=1,
        )
        bias_E = self.time_step_bias[...].astype(jnp.float32)
        time_step_BE = jax.nn.softplus(time_step_BE + bias_E[None])
        decay_BVE = jnp.exp(rate_VE[None] * time_step_BE[:, None])
        return x_BE, x_BE * time_step_BE, decay_BVE, in_BV, out_BV

    def _update(
        self, state_B1VE: Float[Array, "B 1 V E"], prepared: tuple[jax.Array, ...]
    ) -> tuple[Float[Array, "B 1 V E"], Float[Array, "B E"]]:
        x_BE, added_BE, decay_BVE, in_BV, out_BV = prepared
        state_B1VE, out_B1E = update_state(
            state_B1VE, decay_BVE[:, None], in_BV[:, None], added_BE[:, None], out_BV[:, None]
        )
        skip_E = self.skip[...].astype(jnp.float32)
        return state_B1VE, out_B1E[:, 0] + skip_E[None] * x_BE
