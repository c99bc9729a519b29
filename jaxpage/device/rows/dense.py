"""Computes rows of tokens in plain operations of XLA, which have derivatives, without pages.

Attention is computed over whole rows, with all scores in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpage.errors import UnsupportedError
from jaxpage.layers.context import Attend, AttentionOptions, ForwardContext, Recur, Recurrence
from jaxpage.layers.matmul import matmul
from jaxpage.layers.trace_scope import LayerKernels, Routes, TokenAdapters, TraceScope
from jaxpage.layers.weight_kinds import Grouped

# The options of attention that are computed here.
_HONOURED = frozenset(
    {"scale", "sliding_window", "attention_chunk", "logit_softcap", "value_width"}
    | {"sinks", "alibi_slopes"}
)


def dense_logits(
    model: Any,
    num_layers: int,
    token_ids_RC: Int[Array, "R C"],
    chosen: Sequence[jax.Array] | None = None,
    *,
    has_adapter: bool = False,
) -> Float[Array, "T V"]:
    """Returns the float32 logits after each token of rows, each of which begins at position 0.

    Args:
        model: The model, with its parameters.
        num_layers: The number of its layers that keep something.
        token_ids_RC: The rows.
        chosen: The experts of each token, by router; None if the routers choose them.
        has_adapter: True if the model has one slot for adapters, which is that of all tokens.
    """
    num_rows, length = token_ids_RC.shape
    positions_T = jnp.tile(jnp.arange(length), num_rows)
    context = ForwardContext(positions_T, dense_attend(num_rows), recur=dense_recur(num_rows))
    ones_T = jnp.ones(token_ids_RC.size, jnp.int32)
    # The number of adapters is an int: a loop of a traced number of rounds has no gradient.
    adapters = TokenAdapters(ones_T, ones_T[:1], 1) if has_adapter else None
    with TraceScope(_KERNELS, adapters, routes=Routes(chosen)).open():
        hidden_TD, _, _ = model(token_ids_RC.reshape(-1), (None,) * num_layers, context)
        logits_TV: jax.Array = model.logits(hidden_TD)
    return logits_TV


def dense_attend(num_rows: int) -> Attend:
    """Returns attention over rows of equal length, without pages.

    It computes the definition in float32, with all scores in memory. In place of pages it returns
    the keys and values, for layers that read those of another one.
    """

    def attend(
        layer_index: int,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        layer_pages: Any,
        options: AttentionOptions,
        /,
    ) -> tuple[jax.Array, Any]:
        if others := options.set_names - _HONOURED:
            raise UnsupportedError(
                f"attention over whole rows does not compute {', '.join(sorted(others))}"
            )
        if k_TKH is None:
            # The layer reads the keys and values of another one, which stand in for its pages.
            k_TKH, v_TKH = layer_pages
        assert k_TKH is not None
        sinks = options.sinks
        softcap = options.logit_softcap
        num_kv_heads, head_dim = k_TKH.shape[1:]
        length = len(q_TNH) // num_rows
        q = q_TNH.astype(jnp.float32).reshape(num_rows, length, num_kv_heads, -1, head_dim)
        new_pages = k_TKH, k_TKH if v_TKH is None else v_TKH
        k, v = (
            part.astype(jnp.float32).reshape(num_rows, length, num_kv_heads, head_dim)
            for part in new_pages
        )
        scores = options.scale * jnp.einsum(
            "rqkgh,rckh->rkgqc", q, k, precision=jax.lax.Precision.HIGHEST
        )
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        back = jnp.arange(length)[:, None] - jnp.arange(length)
        if options.alibi_slopes is not None:
            slopes = options.alibi_slopes.reshape(num_kv_heads, -1, 1, 1)
            scores = scores - slopes * back
        seen = (back >= 0) & (back < (options.sliding_window or length))
        if options.attention_chunk is not None:
            chunk_C = jnp.arange(length) // options.attention_chunk
            seen &= chunk_C[:, None] == chunk_C
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:
            of_heads = sinks.astype(jnp.float32).reshape(1, num_kv_heads, -1, 1, 1)
            scores = jnp.concatenate(
                [scores, jnp.broadcast_to(of_heads, (*scores.shape[:-1], 1))], axis=-1
            )
        # A sink takes its share of the softmax, and has no value.
        weights = jax.nn.softmax(scores, axis=-1)[..., :length]
        v = v[..., : options.value_width]
        out = jnp.einsum("rkgqc,rckh->rqkgh", weights, v, precision=jax.lax.Precision.HIGHEST)
        return out.reshape(*q_TNH.shape[:2], -1).astype(q_TNH.dtype), (k_TKH, v_TKH)

    return attend


def dense_recur(num_rows: int) -> Recur:
    """Returns the recurrence over rows of equal length, without pages."""

    def recur(
        layer_index: int, x_TE: jax.Array, recurrence: Recurrence, layer_pages: Any, /
    ) -> tuple[jax.Array, Any]:
        lookback = recurrence.state.lookback
        x_RCE = x_TE.reshape(num_rows, -1, x_TE.shape[1])
        padded = jnp.pad(x_RCE, ((0, 0), (lookback, 0), (0, 0)))
        update = recurrence.update
        if update is None or recurrence.state.shape is None:
            # Without a state no token waits for the one before it, so all are computed at once.
            length = x_RCE.shape[1]
            inputs = [padded[:, index : index + length] for index in range(1 + lookback)]
            inputs_TWE = jnp.stack(inputs, axis=2).reshape(len(x_TE), 1 + lookback, -1)
            return recurrence.prepare(inputs_TWE), layer_pages

        def token(states: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
            inputs_RWE = jax.lax.dynamic_slice_in_dim(padded, place, 1 + lookback, axis=1)
            return update(states, recurrence.prepare(inputs_RWE))

        states = jnp.zeros((num_rows, *recurrence.state.shape))
        _, out_CRO = jax.lax.scan(token, states, jnp.arange(x_RCE.shape[1]))
        return out_CRO.swapaxes(0, 1).reshape(len(x_TE), -1), layer_pages

    return recur


def _multiply_groups(
    x_PI: jax.Array, weight_EOI: jax.Array | Grouped, count_E: jax.Array, result: DTypeLike
) -> jax.Array:
    """Multiplies rows that are sorted by group, as `LayerKernels.by_group`."""
    assert not isinstance(weight_EOI, Grouped), "quantised weights are not trained"

    def multiply_ragged(x_PI: jax.Array, weight_EOI: jax.Array, count_E: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(
            x_PI,
            weight_EOI.swapaxes(1, 2),
            count_E,
            precision=jax.lax.Precision.HIGHEST if x_PI.dtype == jnp.float32 else None,
            preferred_element_type=jnp.dtype(result),
        )

    def one_by_one(x_PI: jax.Array, weight_EOI: jax.Array, count_E: jax.Array) -> jax.Array:
        """Multiplies all rows by each weight: on a CPU the other makes E copies of them."""
        index_P = jnp.arange(len(x_PI))

        def multiply(y_PO: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            weight_OI, count, end = group
            is_of_group_P = (index_P >= end - count) & (index_P < end)
            made_PO = matmul(x_PI, weight_OI, result=result)
            return jnp.where(is_of_group_P[:, None], made_PO, y_PO), None

        zeros_PO = jnp.zeros((len(x_PI), weight_EOI.shape[1]), result)
        y_PO, _ = jax.lax.scan(multiply, zeros_PO, (weight_EOI, count_E, jnp.cumsum(count_E)))
        return y_PO

    count_E = count_E.astype(jnp.int32)
    y_PO: jax.Array = jax.lax.platform_dependent(
        x_PI, weight_EOI, count_E, cpu=one_by_one, default=multiply_ragged
    )
    return y_PO


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError("quantised weights have no derivative")


_KERNELS = LayerKernels(_refuse, _refuse, _refuse, _refuse, _multiply_groups)
