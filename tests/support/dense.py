"""A model over one whole sequence, without an engine and without pages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpage.device.attention import make_layer_kernels
from jaxpage.device.hardware.backends import Backend
from jaxpage.device.rows.dense import dense_recur
from jaxpage.layers.context import ForwardContext
from jaxpage.layers.trace_scope import TraceScope
from jaxpage.models.base import abstract_model


def dense_attend(window_error: int = 0) -> Callable[..., Any]:
    """Makes `Attend` over one whole sequence held in memory; `window_error` widens every sliding
    window.
    """

    def attend(
        layer_index,
        q_TNH,
        k_TKH,
        v_TKH,
        layer_pages,
        options,
        /,
    ):
        if k_TKH is None:
            k_TKH, v_TKH = layer_pages
        layer_pages = k_TKH, v_TKH
        num_tokens, num_heads, _ = q_TNH.shape
        sinks, softcap = options.sinks, options.logit_softcap
        v_TKH = k_TKH[..., : options.value_width] if v_TKH is None else v_TKH
        k_TNH, v_TNH = (jnp.repeat(x, num_heads // x.shape[1], axis=1) for x in (k_TKH, v_TKH))
        scores_NQC = (
            jnp.einsum("QNH,CNH->NQC", q_TNH, k_TNH, preferred_element_type=jnp.float32)
            * options.scale
        )
        if softcap is not None:
            scores_NQC = softcap * jnp.tanh(scores_NQC / softcap)
        distance_QC = np.arange(num_tokens)[:, None] - np.arange(num_tokens)[None, :]
        if options.alibi_slopes is not None:
            scores_NQC = scores_NQC - options.alibi_slopes[:, None, None] * distance_QC
        seen_QC = distance_QC >= 0
        if options.sliding_window is not None:
            seen_QC &= distance_QC < options.sliding_window + window_error
        if options.attention_chunk is not None:
            chunk_C = np.arange(num_tokens) // (options.attention_chunk + window_error)
            seen_QC &= chunk_C[:, None] == chunk_C[None, :]
        scores_NQC = jnp.where(jnp.asarray(seen_QC)[None], scores_NQC, -jnp.inf)
        if sinks is not None:
            column_NQ1 = jnp.broadcast_to(sinks[:, None, None], (num_heads, num_tokens, 1))
            scores_NQC = jnp.concatenate([scores_NQC, column_NQ1.astype(scores_NQC.dtype)], axis=-1)
        weights_NQC = jax.nn.softmax(scores_NQC, axis=-1)[..., :num_tokens]
        return jnp.einsum("NQC,CNH->QNH", weights_NQC.astype(v_TNH.dtype), v_TNH), layer_pages

    return attend


def logits_of(
    family: Any,
    spec: Any,
    parameters: dict[Any, Any],
    token_ids: np.ndarray,
    *,
    attend: Any = None,
    dtype: Any = "float32",
    rule: Any = None,
) -> np.ndarray:
    """Returns the logits [T, V] of one sequence.

    rule: of modules that replace the family's.
    """
    logits = _forward(family, spec, dtype, rule, attend)(
        parameters, jnp.asarray(token_ids, jnp.int32)
    )
    assert logits.dtype == jnp.float32
    return np.asarray(logits)


@functools.lru_cache(maxsize=4)  # mistakes in weights are compiled with what is right
def _forward(
    family: Any, spec: Any, dtype: Any, rule: Any, attend: Any
) -> Callable[..., jax.Array]:
    """Computes logits through `nnx.merge` of a pure dict inside `jax.jit`, as the engine does."""
    graph, _ = abstract_model(family, spec, dtype, rule)

    @jax.jit
    def forward(parameters: dict[Any, Any], token_ids_T: jax.Array) -> jax.Array:
        model = nnx.merge(graph, parameters)
        positions_T = jnp.arange(token_ids_T.shape[0])
        context = ForwardContext(positions_T, attend or dense_attend(), recur=dense_recur(1))
        with TraceScope(make_layer_kernels(Backend("auto"))).open():
            hidden_TD, _, _ = model(token_ids_T, (None,) * spec.kv.num_layers, context)
            return model.logits(hidden_TD)

    return forward
