"""Multi-head attention around the seam `attend`, through which `jaxpage/device/` keeps keys and values in paged memory."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpage.layers.context import AttentionOptions, ForwardContext, LayerPages
from jaxpage.layers.linear import Linear, Part, linear
from jaxpage.layers.norms import LayerNorm, RMSNorm
from jaxpage.layers.rope import Rope


class Attention(nnx.Module):
    """Multiplies for queries, keys and values in one product, attends, and multiplies for the output.

    Norms of queries and keys, and their rotation, are optional.

    layer_index: the layer's place in its model.
    query_key_value: three parts, in this order.
    scale: None is `head_width ** -0.5`.
    query_norm, key_norm: norms over each head, or over all heads together (`norm_together`).
    query_growth: (b, n): queries are multiplied by `1 + b log(1 + floor(position / n))` (Llama 4, Ministral 3).
    sliding_window, logit_softcap, sinks: see `AttentionOptions`.
    num_groups: where it is given, `query_key_value` is one part: for each of so many key/value heads its queries, its key
        and its value (Falcon).
    gated: each query head is followed by a gate as wide, and its output is multiplied by the gate's sigmoid (Qwen3-Next).
    """

    def __init__(
        self,
        layer_index: int,
        query_key_value: Linear,
        output: Linear,
        *,
        head_width: int,
        scale: float | None = None,
        sliding_window: int | None = None,
        rope: Rope | None = None,
        query_norm: RMSNorm | LayerNorm | None = None,
        key_norm: RMSNorm | LayerNorm | None = None,
        norm_together: bool = False,
        logit_softcap: float | None = None,
        query_growth: tuple[float, int] | None = None,
        sinks: nnx.Param[jax.Array] | None = None,
        num_groups: int | None = None,
        gated: bool = False,
    ):
        self.layer_index = layer_index
        self.query_key_value, self.output = query_key_value, output
        self.query_norm, self.key_norm, self.norm_together = query_norm, key_norm, norm_together
        self.logit_softcap, self.query_growth = logit_softcap, query_growth
        self.sinks, self.num_groups, self.gated = sinks, num_groups, gated
        self.head_width, self.sliding_window, self.rope = head_width, sliding_window, rope
        self.scale = head_width**-0.5 if scale is None else scale

    def __call__(
        self, x_TI: Float[Array, "T I"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        q, k, v = self.projected(x_TI)
        if self.norm_together:
            q, k = self._normed(q, k)
        return self.attended(q, k, v, layer_pages, context)

    def projected(self, x_TI: Float[Array, "T I"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values [T, heads x H]."""
        fused = self.query_key_value(x_TI)
        if self.num_groups is None:
            ends = list(itertools.accumulate(part.rows for part in self.query_key_value.spec.parts))
            q, k, v = jnp.split(fused, ends[:-1], axis=-1)
            return q, k, v
        num_tokens = fused.shape[0]
        grouped = fused.reshape(num_tokens, self.num_groups, -1, self.head_width)
        q, k, v = grouped[:, :, :-2], grouped[:, :, -2], grouped[:, :, -1]
        return q.reshape(num_tokens, -1), k.reshape(num_tokens, -1), v.reshape(num_tokens, -1)

    def attended(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer_pages: LayerPages,
        context: ForwardContext,
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output for what `projected` made, after those norms that are over all heads."""
        gate_TNH = None
        if self.gated:
            q, gate_TNH = jnp.split(q.reshape(q.shape[0], -1, 2 * self.head_width), 2, axis=-1)
        q_TNH, k_TKH, v_TKH = (
            part.reshape(part.shape[0], -1, self.head_width) for part in (q, k, v)
        )
        if not self.norm_together:
            q_TNH, k_TKH = self._normed(q_TNH, k_TKH)
        if self.rope is not None:
            angles = context.angles(self.rope)
            q_TNH, k_TKH = angles.rotate(q_TNH), angles.rotate(k_TKH)
        if self.query_growth is not None:
            rate, length = self.query_growth
            growth_T = 1 + rate * jnp.log(
                1 + jnp.floor(context.positions_T.astype(jnp.float32) / length)
            )
            q_TNH = q_TNH * growth_T[:, None, None].astype(q_TNH.dtype)
        options = AttentionOptions(
            scale=self.scale,
            sliding_window=self.sliding_window,
            logit_softcap=self.logit_softcap,
            sinks=None if self.sinks is None else self.sinks[...],
        )
        out_TNH, layer_pages = context.attend(
            self.layer_index, q_TNH, k_TKH, v_TKH, layer_pages, options
        )
        if gate_TNH is not None:
            out_TNH = out_TNH * jax.nn.sigmoid(gate_TNH)
        return self.output(out_TNH.reshape(q.shape[0], -1)), layer_pages

    def _normed(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (
            (q, k)
            if self.query_norm is None or self.key_norm is None
            else (self.query_norm(q), self.key_norm(k))
        )


def query_key_value(
    num_in: int, num_queries: int, num_keys: int, *, name: str, bias: bool, dtype: DTypeLike
) -> Linear:
    """Returns one product out of Llama's `q_proj`, `k_proj` and `v_proj`, or out of Phi-3's `qkv_proj`.

    num_queries, num_keys: rows of each, that is heads times head width.
    name: the module of the checkpoint that has these.
    """
    return linear(
        num_in,
        Part(num_queries, "heads", f"{name}.q_proj"),
        Part(num_keys, "kv_heads", f"{name}.k_proj"),
        Part(num_keys, "kv_heads", f"{name}.v_proj"),
        fused=f"{name}.qkv_proj",
        input_axis="embed",
        bias=bias,
        dtype=dtype,
    )
