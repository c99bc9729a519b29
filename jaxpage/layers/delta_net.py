"""Computes linear attention by the gated delta rule (Yang et al., 2024).

A matrix S for each head takes the place of the keys and values of all tokens. A token with the key
k, the value v and the query q lets the matrix decay, replaces the value that S returns for k by v,
to the share `beta`, and reads S with q:

    S = decay * S
    S = S + k (beta * (v - S^T k))^T
    out = S^T q

Queries, keys and values come from a short causal convolution over the tokens' inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpage.layers.context import ForwardContext, LayerPages, Recurrence, StateSpec
from jaxpage.layers.convolution import short_convolution
from jaxpage.layers.linear import Linear
from jaxpage.layers.norms import RMSNorm
from jaxpage.layers.parameter import Axis, Piece, Source, concatenate, parameter, tensor
from jaxpage.layers.state_update import update_state
from jaxpage.layers.trace_scope import row_kernels

NORM_EPSILON = 1e-6  # Keeps the division by the length of a query or key finite.


@dataclass(frozen=True)
class DeltaWidths:
    """Holds the widths of a gated delta net.

    Attributes:
        key_heads: The number of key heads.
        value_heads: The number of value heads; each key head serves the same number of them.
        key: The width of a key head.
        value: The width of a value head.
        kernel: The number of tokens that the convolution spans.
        grouped: True if the outputs of the two products go by key heads. One product has for each
            key head its query, its key, and the values and gates of its value heads; the other
            has the betas and the time steps of these.
        separate: True if checkpoints have a tensor for each product, and may have one for each of
            the convolution kernels of queries, keys and values.
        beta_factor: The factor of betas, which are sigmoids. With 2 the transition of a state may
            have negative eigenvalues (OLMo Hybrid).
        epsilon: The epsilon of the norm of the outputs; None for that of the model's norms.
        by_channel: True if each channel of a key head has its own decay, and gates are sigmoids
            and not SiLU (Kimi Linear).
    """

    key_heads: int
    value_heads: int
    key: int
    value: int
    kernel: int
    grouped: bool = False
    separate: bool = False
    beta_factor: float = 1.0
    epsilon: float | None = None
    by_channel: bool = False

    @property
    def per_key(self) -> int:
        """Returns the number of value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def decays(self) -> int:
        """Returns the number of decays of a value head."""
        return self.key if self.by_channel else 1

    @property
    def keys(self) -> int:
        """Returns the width of the keys of all heads."""
        return self.key_heads * self.key

    @property
    def values(self) -> int:
        """Returns the width of the values of all heads."""
        return self.value_heads * self.value

    @property
    def parts(self) -> tuple[int, int, int]:
        """Returns the widths of the queries, the keys and the values of all heads."""
        return self.keys, self.keys, self.values

    @property
    def convolution_width(self) -> int:
        """Returns the width of the convolution: queries, keys and values of all heads."""
        return sum(self.parts)

    @property
    def state(self) -> StateSpec:
        """Returns the shapes of the state: a matrix for each value head.

        The input of a token has the numbers that are convolved, and for each value head its beta
        and its time steps, from which the decays are computed.
        """
        shape = (self.value_heads, self.key, self.value)
        numbers = self.value_heads * (1 + self.decays)
        return StateSpec(shape, self.convolution_width + numbers, self.kernel - 1)


class ChannelMatmuls(nnx.Module):
    """Computes the time steps of channels, and gates, each by two products of low rank.

    Attributes:
        ranks: The first products of both, to the low rank.
        time_steps: The second product for the time steps.
        gates: The second product for the gates.
    """

    def __init__(self, ranks: Linear, time_steps: Linear, gates: Linear):
        self.ranks = ranks
        self.time_steps = time_steps
        self.gates = gates

    def __call__(self, x_TD: Float[Array, "T D"]) -> tuple[jax.Array, jax.Array]:
        """Returns the time steps and the gates of all heads."""
        time_step_TR, gate_TR = jnp.split(self.ranks(x_TD), 2, axis=1)
        return self.time_steps(time_step_TR), self.gates(gate_TR)


class GatedDeltaNet(nnx.Module):
    """Changes its state by the delta rule, with a decay, and gates its output.

    Attributes:
        layer_index: The layer of the cache that has its states; see `Attend`.
        widths: The widths of the heads.
        input: The product for queries, keys and values, and then for the gates of the outputs,
            unless `channels` computes them.
        beta_step: The product for betas, and for time steps unless `channels` computes them. It is
            apart because quantised checkpoints do not quantise its weight. In both products the
            parts of all heads come one after another, unless `DeltaWidths.grouped` is True.
        norm: The norm over the output of each value head, before its gate.
        output: The product for the output.
        channels: The products for time steps and gates if `DeltaWidths.by_channel` is True; None
            otherwise.
        convolution: The kernel of the convolution.
        rate: The logarithm of each value head's rate of decay.
        time_step_bias: The biases of time steps.
    """

    def __init__(
        self,
        layer_index: int,
        input: Linear,
        beta_step: Linear,
        norm: RMSNorm,
        output: Linear,
        widths: DeltaWidths,
        *,
        channels: ChannelMatmuls | None = None,
        name: str,
        dtype: DTypeLike,
    ):
        self.layer_index = layer_index
        self.widths = widths
        self.input = input
        self.beta_step = beta_step
        self.norm = norm
        self.output = output
        self.channels = channels
        kernel = (1, widths.kernel)
        heads = widths.value_heads
        convolution = [tensor(f"{name}.conv1d.weight", widths.convolution_width, *kernel)]
        if widths.separate:
            # transformers saves three parts of equal size, even if keys and values differ in width.
            third = -(-widths.convolution_width // 3)
            equal = (third, third, widths.convolution_width - 2 * third)
            # Each goes in front, because the first source is taken whose tensors are all there.
            # Where the parts are of equal size, both ways are the same source.
            for parts in dict.fromkeys((equal, widths.parts)):
                tensors = [
                    tensor(f"{name}.{part}_conv1d.weight", rows, *kernel)
                    for part, rows in zip("qkv", parts, strict=True)
                ]
                convolution.insert(0, concatenate(tensors))
        rate = tensor(f"{name}.A_log", heads)
        if widths.by_channel:
            # Kimi Linear stores a rate for each head with axes of one around it.
            rate = Source((heads,), (Piece(f"{name}.A_log", (1, 1, heads, 1), (heads,), (0,)),))
        num_steps = heads * widths.decays

        def declare(axis: Axis, *shape: int, sources: list[Source]) -> nnx.Param[jax.Array]:
            axes = (axis, *(None,) * (len(shape) - 1))
            return parameter(shape, axes=axes, dtype=dtype, sources=sources)

        axis = tuple(("heads", rows) for rows in widths.parts)
        self.convolution = declare(axis, widths.convolution_width, *kernel, sources=convolution)
        self.rate = declare("heads", heads, sources=[rate])
        self.time_step_bias = declare(
            "heads", num_steps, sources=[tensor(f"{name}.dt_bias", num_steps)]
        )

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages."""
        widths = self.widths
        input_TE, gate = self._project(x_TD)
        recurrence = Recurrence(self._prepare, self._update, widths.state)
        out, layer_pages = context.recur(self.layer_index, input_TE, recurrence, layer_pages)
        shape = (x_TD.shape[0], widths.value_heads, widths.value)
        activation = jax.nn.sigmoid if widths.by_channel else jax.nn.silu
        gate_TNH = activation(gate.astype(jnp.float32)).reshape(shape)
        # Rounded before the norm, because transformers returns the recurrence in the model's type.
        gated_TNH = self.norm(out.astype(x_TD.dtype).reshape(shape)).astype(jnp.float32) * gate_TNH
        return self.output(gated_TNH.astype(x_TD.dtype).reshape(x_TD.shape[0], -1)), layer_pages

    def _project(
        self, x_TD: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T E"], Float[Array, "T _"]]:
        """Returns the input of the recurrence, and the gates."""
        widths = self.widths
        num_tokens = x_TD.shape[0]
        mixed = self.input(x_TD)
        numbers = self.beta_step(x_TD)
        if self.channels is not None:
            time_steps, gate = self.channels(x_TD)
            return jnp.concatenate([mixed, numbers, time_steps], axis=1), gate
        if not widths.grouped:
            mixed, gate = jnp.split(mixed, [widths.convolution_width], axis=1)
            return jnp.concatenate([mixed, numbers], axis=1), gate
        mixed, numbers = (
            each.reshape(num_tokens, widths.key_heads, -1) for each in (mixed, numbers)
        )
        # The parts of one key head; values and gates are those of all its value heads.
        ends = [widths.key, 2 * widths.key, 2 * widths.key + widths.per_key * widths.value]
        q, k, v, gate = jnp.split(mixed, ends, axis=-1)
        parts = (q, k, v, *jnp.split(numbers, 2, axis=-1))
        of_all = jnp.concatenate([part.reshape(num_tokens, -1) for part in parts], axis=1)
        return of_all, gate.reshape(num_tokens, -1)

    def _prepare(self, inputs_BWE: Float[Array, "B W E"]) -> tuple[jax.Array, ...]:
        """Returns a token's query, key, value, decays and beta for each value head, in float32.

        Keys have length one, and queries the length `key ** -0.5`.
        """
        widths = self.widths
        inputs_BWE = inputs_BWE.astype(jnp.float32)
        mixed_BC = short_convolution(
            inputs_BWE[..., : widths.convolution_width], self.convolution[...]
        )
        q, k, v = jnp.split(jax.nn.silu(mixed_BC), [widths.keys, 2 * widths.keys], axis=-1)

        def of_heads(x: jax.Array) -> jax.Array:
            x = x.reshape(-1, widths.key_heads, widths.key)
            return jnp.repeat(_divide_by_length(x), widths.per_key, axis=1)

        beta_BN, time_step_BE = jnp.split(
            inputs_BWE[:, -1, widths.convolution_width :], [widths.value_heads], axis=-1
        )
        beta_BN = jax.nn.sigmoid(beta_BN)
        if widths.beta_factor != 1.0:
            beta_BN = beta_BN * widths.beta_factor
        v_BNV = v.reshape(-1, widths.value_heads, widths.value)
        decay_BNK = self._decay(time_step_BE)
        return of_heads(q) * widths.key**-0.5, of_heads(k), v_BNV, decay_BNK, beta_BN

    def _decay(self, time_step_BE: Float[Array, "B E"]) -> Float[Array, "B N K"]:
        """Returns the decay of each value head, or of each channel of its key."""
        rate_1N, bias_1E = (
            each[...].astype(jnp.float32)[None] for each in (self.rate, self.time_step_bias)
        )
        rate_1N = jnp.exp(rate_1N)
        time_step_BE = jax.nn.softplus(time_step_BE + bias_1E)
        if not self.widths.by_channel:
            return jnp.exp(-rate_1N * time_step_BE)[..., None]
        time_step_BNK = time_step_BE.reshape(-1, self.widths.value_heads, self.widths.decays)
        return jnp.exp(-rate_1N[..., None] * time_step_BNK)

    def _update(
        self, state_BNKV: Float[Array, "B N K V"], prepared: tuple[jax.Array, ...]
    ) -> tuple[Float[Array, "B N K V"], Float[Array, "B _"]]:
        q_BNK, k_BNK, v_BNV, decay_BNK, beta_BN = prepared
        state_BNKV, out_BNV = update_state(
            state_BNKV, decay_BNK[..., None], k_BNK, v_BNV, q_BNK, beta_BN
        )
        return state_BNKV, out_BNV.reshape(len(q_BNK), -1)


def _divide_by_length(x_BNK: Float[Array, "B N K"]) -> Float[Array, "B N K"]:
    """Returns the vectors with length one."""
    kernels = row_kernels(x_BNK.dtype)
    if kernels is None or kernels.update_state is None:
        squares = jnp.square(x_BNK).sum(axis=-1, keepdims=True)
        return x_BNK * jax.lax.rsqrt(squares + NORM_EPSILON)
    width = x_BNK.shape[-1]
    # An RMS norm divides by the root of the mean of squares. With this scale, and an epsilon that
    # is divided by the width as the squares are, it divides by the length: the kernel's sum has one
    # order.
    scale_K = jnp.full(width, width**-0.5, x_BNK.dtype)
    rows = x_BNK.reshape(-1, width)
    return kernels.rms_norm(rows, scale_K, NORM_EPSILON / width, 0.0).reshape(x_BNK.shape)
