"""Multi-head attention calls `attend`, which keeps keys and values in paged memory.

The step provides `attend`; its implementation is in `jaxpage/device/`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.layers.context import AttentionOptions, ForwardContext, HeadScales, LayerPages
from jaxpage.layers.linear import Linear, Part, linear
from jaxpage.layers.norms import HeadNorm, LayerNorm, RMSNorm
from jaxpage.layers.rope import Rope


@dataclass(frozen=True)
class Projections:
    """Holds the products of attention.

    Attributes:
        query_key_value: The product for queries, keys and values: three parts in this order. Where
            it has two, the keys before their norm are the values too; where it has one, the layer
            reads the keys and values of another one, whose number and pages it has.
        output: The product for the output.
        num_groups: The number of key/value heads, where `query_key_value` is one part that has for
            each of them its queries, its key and its value (Falcon); otherwise None.
        gates: The product for the gates; None if there are none, or `query_key_value` has them
            after the queries of each head (Qwen3-Next).
        num_gates: The number of gates of a query head: none, one for each channel (Qwen3-Next,
            Trinity), or one (LFM3). They follow their head in what `Attention.project` returns, and
            their sigmoids multiply the head's output.
    """

    query_key_value: Linear
    output: Linear
    num_groups: int | None = None
    gates: Linear | None = None
    num_gates: int = 0


@dataclass(frozen=True)
class HeadNorms:
    """Holds the norms of queries, keys and values; None for each that does not exist.

    Attributes:
        query: The norm of queries.
        key: The norm of keys.
        value: The norm of values.
        over_all_heads: True if those of queries and keys are over all heads together, not over each
            head.
        after_rotation: True if those of queries and keys follow the rotation (HunYuan).
    """

    query: RMSNorm | LayerNorm | HeadNorm | None = None
    key: RMSNorm | LayerNorm | HeadNorm | None = None
    value: RMSNorm | None = None
    over_all_heads: bool = False
    after_rotation: bool = False


@dataclass(frozen=True)
class Scores:
    """Says how scores are made of queries and keys.

    Attributes:
        scale: The factor of the scores; None for `head_dim ** -0.5`.
        sliding_window: See `AttentionOptions`.
        chunked: True if this window does not slide: it is the size of chunks of positions
            (`AttentionOptions.attention_chunk`).
        logit_softcap: See `AttentionOptions`.
        temperature_tuning: Three numbers (b, n, s): queries are multiplied by
            `1 + b log(1 + floor((position + s) / n))` (Llama 4, Ministral 3).
        sinks: See `AttentionOptions`.
        alibi_slopes: See `AttentionOptions`: those of all query heads of the model.
        sees_ahead: False if tokens of a picture see no later ones in this layer, in a model in
            which they do in others (Gemma 4).
    """

    scale: float | None = None
    sliding_window: int | None = None
    chunked: bool = False
    logit_softcap: float | None = None
    temperature_tuning: tuple[float, int, int] | None = None
    sinks: nnx.Param[jax.Array] | None = None
    alibi_slopes: tuple[float, ...] | None = None
    sees_ahead: bool = True


@dataclass(frozen=True)
class Values:
    """Says how values differ from keys.

    Attributes:
        head_dim: The width of a value head, at most that of keys; None for the same. The cache pads
            narrower values with zeros.
        scale: The factor by which values are multiplied.
    """

    head_dim: int | None = None
    scale: float = 1.0


class Attention(nnx.Module):
    """Projects to queries, keys and values in one product, attends, and projects to the output.

    Norms of queries and keys, and their rotation, are optional. The module has the attributes of
    the records that it is made of.
    """

    def __init__(
        self,
        layer_index: int,
        projections: Projections,
        *,
        head_dim: int,
        rope: Rope | None = None,
        norms: HeadNorms = HeadNorms(),
        scores: Scores = Scores(),
        values: Values = Values(),
        clip_qkv: float | None = None,
    ):
        """Makes the layer.

        Args:
            layer_index: The layer of the cache whose pages it reads; see `Attend`.
            projections: The products.
            head_dim: The width of a head (H).
            rope: The rotation of queries and keys; None if there is none.
            norms: The norms of queries, keys and values.
            scores: How scores are made.
            values: How values differ from keys.
            clip_qkv: Queries, keys and values are cut to -clip_qkv to clip_qkv, after norms over
                all heads together (OLMo); None to leave them.
        """
        self.layer_index = layer_index
        self.query_key_value = projections.query_key_value
        self.output = projections.output
        self.num_groups = projections.num_groups
        self.num_gates = projections.num_gates
        self.gates = projections.gates
        self.query_norm = norms.query
        self.key_norm = norms.key
        self.value_norm = norms.value
        self.norm_over_all_heads = norms.over_all_heads
        self.norm_after_rotation = norms.after_rotation
        self.logit_softcap = scores.logit_softcap
        self.temperature_tuning = scores.temperature_tuning
        self.sinks = scores.sinks
        self.alibi_slopes = scores.alibi_slopes
        self.sliding_window = scores.sliding_window
        self.chunked = scores.chunked
        self.sees_ahead = scores.sees_ahead
        self.scale = head_dim**-0.5 if scores.scale is None else scores.scale
        self.head_dim = head_dim
        self.value_head_dim = values.head_dim or head_dim
        self.value_scale = values.scale
        self.clip_qkv = clip_qkv
        self.rope = rope

    def __call__(
        self, x_TI: Float[Array, "T I"], layer_pages: LayerPages, context: ForwardContext
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output of the layer and its pages."""
        has_norms = (self.query_norm, self.key_norm, self.value_norm) != (None, None, None)
        # Without that kernel norms are a call of their own, and the general way below has them.
        norms = None if context.rotate_and_write is None else self._head_scales()
        if self.rope is not None and self._is_plain and (norms is not None or not has_norms):
            return self._over_heads(*self._rotate(x_TI, layer_pages, context, norms), context)
        q, k, v = self.project(x_TI)
        if self.norm_over_all_heads:
            q, k = self._norm(q, k)
        return self.attend(q, k, v, layer_pages, context)

    def _rotate(
        self,
        x_TI: Float[Array, "T I"],
        layer_pages: LayerPages,
        context: ForwardContext,
        norms: HeadScales | None,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None, LayerPages]:
        """Returns queries and keys that are normed and rotated, values, and pages.

        Keys and values are None where they are in the pages already.
        """
        assert self.rope is not None, "it rotates"
        angles = context.angles(self.rope)
        x_TF = self.query_key_value(x_TI)
        if context.rotate_and_write is not None:
            written = context.rotate_and_write(
                self.layer_index, x_TF, self.head_dim, angles, layer_pages, norms
            )
            if written is not None:
                return written[0], None, None, written[1]
        # The kernel did not take these heads or angles, so norms and rotation follow here, in its
        # order.
        num_keys = self.query_key_value.spec.parts[1].rows // self.head_dim
        if norms is not None:
            x_TMH = x_TF.reshape(len(x_TF), -1, self.head_dim)
            q_TNH, k_TKH, v_TKH = jnp.split(x_TMH, [-2 * num_keys, -num_keys], axis=1)
            assert self.query_norm is not None and self.key_norm is not None, "they gave the scales"
            q_TNH, k_TKH = self.query_norm(q_TNH), self.key_norm(k_TKH)
            return angles.rotate(q_TNH), angles.rotate(k_TKH), v_TKH, layer_pages
        return *angles.split_and_rotate(x_TF, num_keys, self.head_dim), layer_pages

    def project(
        self, x_TI: Float[Array, "T I"]
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Returns queries, keys and values [T, heads x H]; see `query_key_value`.

        Each query head is followed by its gates, where it has any.

        A model over several devices calls this and `attend` by themselves, with a norm over all
        devices in between.
        """
        fused = self.query_key_value(x_TI)
        if self.num_groups is None:
            ends = list(itertools.accumulate(part.rows for part in self.query_key_value.spec.parts))
            q, *keys_and_values = jnp.split(fused, ends[:-1], axis=-1)
            q = self._with_gates(q, x_TI)
            return (
                # With two parts the last one is the keys: they are the values, too, before their
                # norm.
                (q, keys_and_values[0], keys_and_values[-1]) if keys_and_values else (q, None, None)
            )
        num_tokens = fused.shape[0]
        grouped = fused.reshape(num_tokens, self.num_groups, -1, self.head_dim)
        q = self._with_gates(grouped[:, :, :-2].reshape(num_tokens, -1), x_TI)
        k = grouped[:, :, -2]
        v = grouped[:, :, -1]
        return q, k.reshape(num_tokens, -1), v.reshape(num_tokens, -1)

    def _with_gates(self, q: jax.Array, x_TI: Float[Array, "T I"]) -> jax.Array:
        """Returns queries, each head followed by its gates if there is a product for gates."""
        if self.gates is None:
            return q
        q_TNH = q.reshape(len(q), -1, self.head_dim)
        gate_TNG = self.gates(x_TI).reshape(*q_TNH.shape[:2], self.num_gates)
        return jnp.concatenate([q_TNH, gate_TNG], axis=-1).reshape(len(q), -1)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        layer_pages: LayerPages,
        context: ForwardContext,
        place: jax.Array | int = 0,
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output for the queries, keys and values that `project` returned.

        Norms over all heads together must have been applied already. `place` says which of the
        equal parts of the model's heads these are.
        """
        if self.clip_qkv is not None:
            q = jnp.clip(q, -self.clip_qkv, self.clip_qkv)
            k = None if k is None else jnp.clip(k, -self.clip_qkv, self.clip_qkv)
            v = None if v is None else jnp.clip(v, -self.clip_qkv, self.clip_qkv)
        gate_TNH = None
        if self.num_gates:
            q_TNG = q.reshape(len(q), -1, self.head_dim + self.num_gates)
            q, gate_TNH = jnp.split(q_TNG, [self.head_dim], axis=-1)
        heads = (len(q), -1, self.head_dim)
        q_TNH = q.reshape(heads)
        k_TKH = None if k is None else k.reshape(heads)
        v_TKH = None if v is None else self._values(v)
        if not self.norm_over_all_heads and not self.norm_after_rotation:
            q_TNH, k_TKH = self._norm(q_TNH, k_TKH)
        if self.value_norm is not None and v_TKH is not None:
            v_TKH = self.value_norm(v_TKH)
        if self.rope is not None:
            angles = context.angles(self.rope)
            q_TNH = angles.rotate(q_TNH)
            k_TKH = None if k_TKH is None else angles.rotate(k_TKH)
        if self.norm_after_rotation:
            q_TNH, k_TKH = self._norm(q_TNH, k_TKH)
        return self._over_heads(q_TNH, k_TKH, v_TKH, layer_pages, context, gate_TNH, place)

    @property
    def _is_plain(self) -> bool:
        """Returns whether nothing but norms and a rotation is between the product and attention."""
        parts = self.query_key_value.spec.parts
        is_whole = self.clip_qkv is None and not self.num_gates
        is_usual = self.value_head_dim == self.head_dim and self.value_scale == 1.0
        return len(parts) == 3 and is_whole and is_usual

    def _head_scales(self) -> HeadScales | None:
        """Returns the norms of queries and keys; None where a kernel for both cannot have them."""
        norms = (self.query_norm, self.key_norm)
        if self.norm_over_all_heads or self.norm_after_rotation or self.value_norm is not None:
            return None
        query, key = (
            (norm.scale[...], norm.epsilon, norm.offset)
            if isinstance(norm, RMSNorm) and norm.scale is not None and norm.groups == 1
            else None
            for norm in norms
        )
        # The kernel takes one epsilon and one offset for queries and keys.
        if query is None or key is None or query[1:] != key[1:]:
            return None
        return HeadScales(query[0], *key)

    def _over_heads(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        layer_pages: LayerPages,
        context: ForwardContext,
        gate_TNH: jax.Array | None = None,
        place: jax.Array | int = 0,
    ) -> tuple[Float[Array, "T D"], LayerPages]:
        """Returns the output for queries and keys that have been normed and rotated."""
        if self.temperature_tuning is not None:
            q_TNH = scale_by_position(q_TNH, context.positions_T, self.temperature_tuning)
        # Only a step with vectors says how far the tokens of a picture see. Here each sees up to
        # itself, which undoes that.
        is_bounded = not self.sees_ahead and context.vectors is not None
        options = AttentionOptions(
            scale=self.scale,
            sliding_window=None if self.chunked else self.sliding_window,
            attention_chunk=self.sliding_window if self.chunked else None,
            logit_softcap=self.logit_softcap,
            sinks=None if self.sinks is None else self.sinks[...],
            alibi_slopes=self._slopes(q_TNH.shape[1], place),
            last_seen_T=context.positions_T if is_bounded else None,
        )
        out_TNH, layer_pages = context.attend(
            self.layer_index, q_TNH, k_TKH, v_TKH, layer_pages, options
        )
        if self.value_head_dim < self.head_dim:
            out_TNH = out_TNH[..., : self.value_head_dim]
        if gate_TNH is not None:
            out_TNH = out_TNH * jax.nn.sigmoid(gate_TNH)
        return self.output(out_TNH.reshape(len(q_TNH), -1)), layer_pages

    def _values(self, v: jax.Array) -> jax.Array:
        """Returns the values of each head, as wide as keys."""
        v_TKH = v.reshape(len(v), -1, self.value_head_dim)
        if self.value_scale != 1.0:
            v_TKH = v_TKH * self.value_scale
        missing = self.head_dim - self.value_head_dim
        return jnp.pad(v_TKH, ((0, 0), (0, 0), (0, missing))) if missing else v_TKH

    def _slopes(self, num_heads: int, place: jax.Array | int) -> jax.Array | None:
        if self.alibi_slopes is None:
            return None
        # Slopes depend on a head's number in the whole model; a shard has those of its place.
        slopes_PN = jnp.asarray(self.alibi_slopes, jnp.float32).reshape(-1, num_heads)
        return jax.lax.dynamic_index_in_dim(slopes_PN, place, keepdims=False)

    def _norm(self, q: jax.Array, k: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        if self.query_norm is not None:
            q = self.query_norm(q)
        return q, k if k is None or self.key_norm is None else self.key_norm(k)


def scale_by_position(
    q_TNH: Float[Array, "T N H"], positions_T: Int[Array, "T"], tuning: tuple[float, int, int]
) -> Float[Array, "T N H"]:
    """Returns queries scaled by their positions; see `Scores.temperature_tuning`."""
    rate, length, start = tuning
    # In float32 whatever the model's type: bfloat16 has not every whole number beyond 256.
    position_T = (positions_T + start).astype(jnp.float32)
    factor_T = 1 + rate * jnp.log(1 + jnp.floor(position_T / length))
    return q_TNH * factor_T[:, None, None].astype(q_TNH.dtype)


def query_key_value(
    num_in: int,
    num_queries: int,
    num_keys: int,
    *,
    name: str,
    names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
    fused: str | None = None,
    is_grouped: bool = False,
    bias: bool,
    dtype: DTypeLike,
) -> Linear:
    """Returns one product for Llama's `q_proj`, `k_proj` and `v_proj`, or for Phi-3's `qkv_proj`.

    Args:
        num_in: The width of the input.
        num_queries: The rows of the queries: heads times head width.
        num_keys: The rows of the keys, and of the values.
        name: The module of the checkpoint that has these modules.
        names: Their names in it.
        fused: The product in files of a family whose products are never apart.
        is_grouped: True if that product is one part; see `Projections.num_groups`.
        bias: True if the products have biases.
        dtype: The type of the weights.
    """
    if is_grouped:
        part = Part(num_queries + 2 * num_keys, "kv_heads", f"{name}.{fused}")
        return linear(num_in, part, input_axis="embed", bias=bias, dtype=dtype)
    sizes = ((num_queries, "heads"), (num_keys, "kv_heads"), (num_keys, "kv_heads"))
    parts = [
        Part(rows, axis, None if fused else f"{name}.{module}")
        for module, (rows, axis) in zip(names, sizes, strict=True)
    ]
    return linear(
        num_in,
        *parts,
        fused=f"{name}.{fused or 'qkv_proj'}",
        input_axis="embed",
        bias=bias,
        dtype=dtype,
    )
