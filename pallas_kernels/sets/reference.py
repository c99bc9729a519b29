"""Defines the results of all operations, as a kernel set that the others must agree with.

In attention each query token gathers the blocks of its row's table, and one float32 softmax runs
over them. That reads T x M x S positions, so it is for tests, and the last choice of "auto".
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arguments
from pallas_kernels.kernel_set import Call, KernelSet, Matmuls, Moves
from pallas_kernels.page_layouts import INTERLEAVED, SEPARATE, separate
from pallas_kernels.quantized_pages import dequantize
from pallas_kernels.query_tiles import token_rows
from pallas_kernels.xla import matmul, move, write

# Products are in float32, without TF32 on GPUs.
_matmul = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def visible_TC(arguments: Arguments, num_positions: int) -> jax.Array:
    """Returns which context positions each query token attends to, as a boolean [T, C]."""
    window = arguments.options.sliding_window
    chunk = arguments.options.attention_chunk
    tree_mask_TQ = arguments.options.tree_mask_TQ
    rows = token_rows(arguments.context_len_B, arguments.query_start, arguments.q_TNH.shape[0])
    position_C = jnp.arange(num_positions)[None, :]
    last_T = rows.position_T
    if (last_seen_T := arguments.options.last_seen_T) is not None:
        within_T = jnp.minimum(last_seen_T, arguments.context_len_B[rows.row_T] - 1)
        last_T = jnp.maximum(last_T, within_T)
    seen_TC = position_C <= last_T[:, None]
    if tree_mask_TQ is not None:
        index_TC = (
            position_C - (rows.position_T - rows.offset_T)[:, None]
        )  # the place of a context position among its row's query tokens
        width = tree_mask_TQ.shape[1]
        # What is clipped is not used: `index_TC` says below which positions are in the mask.
        branch_TC = jnp.take_along_axis(tree_mask_TQ, jnp.clip(index_TC, 0, width - 1), axis=1)
        seen_TC = jnp.where(index_TC < 0, seen_TC, branch_TC & (index_TC < width))
        seen_TC &= position_C < arguments.context_len_B[rows.row_T][:, None]
    if window is not None:
        seen_TC &= position_C > rows.position_T[:, None] - window
    if chunk is not None:
        seen_TC &= position_C >= (rows.position_T - rows.position_T % chunk)[:, None]
    return seen_TC & rows.valid_T[:, None]


def attend(arguments: Arguments) -> jax.Array:
    """Returns out_TNH in the queries' type."""
    options = arguments.options
    rows = token_rows(arguments.context_len_B, arguments.query_start, arguments.q_TNH.shape[0])
    num_tokens, num_heads, width = arguments.q_TNH.shape
    num_kv_heads = arguments.num_kv_heads
    num_positions = arguments.block_table_BM.shape[1] * arguments.k_pages.shape[1]
    table_TM = arguments.block_table_BM[rows.row_T]

    @jax.named_scope("gather")  # for profiles: see `jaxpage.bench.studies.step_profile`
    def gather(pages: jax.Array) -> jax.Array:
        return pages[table_TM].reshape(num_tokens, num_positions, *pages.shape[2:])

    k_TCKH = dequantize(*jax.tree.map(gather, (arguments.k_pages, arguments.k_scale)))
    if arguments.interleaved:
        k_TCKH, v_TCKH = separate(k_TCKH, width)
    elif arguments.v_pages is None:
        v_TCKH = k_TCKH[..., : arguments.out_width]
    else:
        v_TCKH = dequantize(*jax.tree.map(gather, (arguments.v_pages, arguments.v_scale)))
    q_TKGH = arguments.q_TNH.reshape(
        num_tokens, num_kv_heads, num_heads // num_kv_heads, width
    ).astype(jnp.float32)
    scores = _matmul("tkgh,tckh->tkgc", q_TKGH * options.scale, k_TCKH)
    if options.logit_softcap is not None:
        scores = options.logit_softcap * jnp.tanh(scores / options.logit_softcap)
    seen_TC = visible_TC(arguments, num_positions)
    if options.alibi_slopes is not None:
        # What a token sees of a tree of drafts is its branch, so it counts what it sees.
        back_TC = jnp.cumsum(seen_TC[:, ::-1], axis=1)[:, ::-1] - 1
        slopes_KG = options.alibi_slopes.reshape(num_kv_heads, -1)
        scores -= slopes_KG[None, :, :, None] * back_TC[:, None, None, :]
    seen = seen_TC[:, None, None, :]
    top = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True)
    sink = None if options.sinks is None else options.sinks.reshape(1, num_kv_heads, -1, 1)
    top = top if sink is None else jnp.maximum(top, sink)
    # A token that sees nothing has -inf here, and -inf minus -inf would be NaN.
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    total = weights.sum(-1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - top)
    # A token that sees nothing (padding) gets zeros.
    weights = weights / jnp.where(total == 0.0, 1.0, total)
    # Masked slots may hold anything, even NaN, and zero times NaN is NaN.
    v_TCKH = jnp.where(seen_TC[:, :, None, None], v_TCKH, 0.0)
    out_TKGH = _matmul("tkgc,tckh->tkgh", weights, v_TCKH)
    return out_TKGH.reshape(num_tokens, num_heads, -1).astype(arguments.q_TNH.dtype)


def supports(device: Any, call: Call) -> str | None:
    """Returns why plain XLA refuses a call; the device does not matter."""
    if call.interpret or call.tiles is not None:
        return "no kernel, so it takes neither interpret nor tiles"
    return None


SET = KernelSet(
    name="reference",
    attend=attend,
    write=write.write,
    moves=Moves(
        copy_blocks=move.copy_blocks,
        copy_slots=move.copy_slots,
        gather_blocks=move.gather_blocks,
        scatter_blocks=move.scatter_blocks,
    ),
    matmuls=Matmuls(multiply=matmul.multiply),
    honours=frozenset(
        {"scale", "sliding_window", "logit_softcap", "value_width", "sinks", "alibi_slopes"}
        | {"attention_chunk", "tree_mask_TQ", "last_seen_T"}
    ),
    supports=supports,
    layouts=(SEPARATE, INTERLEAVED),
)
