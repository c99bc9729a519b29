"""Linear attention by the gated delta rule (Yang et al., 2024): a matrix for each head in place of keys and values of all tokens.

A token lets the matrix decay, then replaces what it holds under its key by its value, to the share `beta`, and reads it with its query:

    S = decay * S;  S = S + k (beta * (v - S^T k))^T;  out = S^T q

Queries, keys and values come out of a short causal convolution over the tokens' inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpage.layers.context import ForwardContext, LayerPages, StateSpec
from jaxpage.layers.linear import Linear
from jaxpage.layers.norms import RMSNorm
from jaxpage.layers.parameter import parameter, tensor

NORM_EPSILON = 1e-6  # of the length of queries and keys


@dataclass(frozen=True)
class DeltaWidths:
    """key_heads, value_heads: how many; each key head serves as many value heads. key, value: of one head. kernel: of the convolution."""

    key_heads: int
    value_heads: int
    key: int
    value: int
    kernel: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key

    @property
    def values(self) -> int:
        return self.value_heads * self.value

    @property
    def convolved(self) -> int:
        """Queries, keys and values of all heads."""
        return 2 * self.keys + self.values

    @property
    def state(self) -> StateSpec:
        """The input of a token is what is convolved, and two numbers for each value head: of beta, and of the decay."""
        shape = (self.value_heads, self.key, self.value)
        return StateSpec(shape, self.convolved + 2 * self.value_heads, self.kernel - 1)


class GatedDeltaNet(nnx.Module):
    """input: to the input of the recurrence (see `DeltaWidths.state`), and behind it to the gates of the outputs.

    norm: of each value head's output, before its gate. name: of the module in the checkpoint.
    """

    def __init__(
        self,
        layer_index: int,
        input: Linear,
        norm: RMSNorm,
        output: Linear,
        widths: DeltaWidths,
        *,
        name: str,
        dtype: DTypeLike,
    ):
        self.layer_index, self.widths = layer_index, widths
        self.input, self.norm, self.output = input, norm, output
        kernel, heads = (widths.convolved, 1, widths.kernel), widths.value_heads

        def declare(part: str, *shape: int) -> nnx.Param[jax.Array]:
            axes = ("heads", *(None,) * (len(shape) - 1))
            return parameter(shape, axes=axes, dtype=dtype, sources=[tensor(f"{name}.{part}", *shape)])

        self.convolution = declare("conv1d.weight", *kernel)
        self.decay, self.time_step = declare("A_log", heads), declare("dt_bias", heads)

    def __call__(
        self, x_TD: Float[Array, "T D"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        widths = self.widths
        input_TE, gate = jnp.split(self.input(x_TD), [widths.state.input_width], axis=-1)
        out, layer_pages = context.recur(self.layer_index, input_TE, self._update, widths.state, layer_pages)
        shape = (x_TD.shape[0], widths.value_heads, widths.value)
        gate_TNH = jax.nn.silu(gate.astype(jnp.float32)).reshape(shape)
        gated_TNH = self.norm(out.astype(x_TD.dtype).reshape(shape)).astype(jnp.float32) * gate_TNH
        return self.output(gated_TNH.astype(x_TD.dtype).reshape(x_TD.shape[0], -1)), layer_pages

    def _update(
        self, state_BNKV: Float[Array, "B N K V"], inputs_BWE: Float[Array, "B W E"]
    ) -> tuple[Float[Array, "B N K V"], Float[Array, "B _"]]:
        """One token of each row: see `layers.context.Update`. In float32."""
        widths, heads = self.widths, self.widths.value_heads
        inputs_BWE = inputs_BWE.astype(jnp.float32)
        share_BN, step_BN = jnp.split(inputs_BWE[:, -1, widths.convolved :], 2, axis=-1)
        q_BNK, k_BNK, v_BNV = self._convolved(inputs_BWE[..., : widths.convolved])
        rate_1N, time_step_1N = (each[...].astype(jnp.float32)[None] for each in (self.decay, self.time_step))
        decay_BN = jnp.exp(-jnp.exp(rate_1N) * jax.nn.softplus(step_BN + time_step_1N))
        state_BNKV = state_BNKV * decay_BN[..., None, None]
        held_BNV = (state_BNKV * k_BNK[..., None]).sum(axis=2)
        change_BNV = (v_BNV - held_BNV) * jax.nn.sigmoid(share_BN)[..., None]
        state_BNKV = state_BNKV + k_BNK[..., None] * change_BNV[:, :, None]
        out_BNV = (state_BNKV * q_BNK[..., None]).sum(axis=2)
        return state_BNKV, out_BNV.reshape(-1, heads * widths.value)

    def _convolved(self, inputs_BWC: Float[Array, "B W C"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of the last token, for each value head; queries and keys of length one, queries scaled."""
        widths, kernel_WC = self.widths, self.convolution[...][:, 0].astype(jnp.float32).T
        mixed_BC = inputs_BWC[:, 0] * kernel_WC[:1]
        for place in range(1, widths.kernel):
            mixed_BC += inputs_BWC[:, place] * kernel_WC[place][None]
        mixed_BC = jax.nn.silu(mixed_BC)
        q, k, v = jnp.split(mixed_BC, [widths.keys, 2 * widths.keys], axis=-1)
        per_key = widths.value_heads // widths.key_heads

        def of_heads(x: jax.Array) -> jax.Array:
            x = x.reshape(-1, widths.key_heads, widths.key)
            length = jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + NORM_EPSILON)
            return jnp.repeat(x * length, per_key, axis=1)

        return of_heads(q) * widths.key**-0.5, of_heads(k), v.reshape(-1, widths.value_heads, widths.value)
