"""Defines the kernel set of Pallas' Mosaic GPU backend, for Hopper (sm_90a).

It is made for the attention of prompt chunks and wide verification first, and decodes as well.
Plain XLA writes and moves pages, so that the set does not need Pallas' Triton backend.

Outside of the kernel, the queries are gathered into tiles of 64 or 128 rows (query tokens times the
query heads of one key/value head), and its results are gathered back. `mosaic.kernel` has the
kernel, and says what differs in the interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arguments
from pallas_kernels.compat import MOSAIC_INTERPRETABLE, x64_reason
from pallas_kernels.kernel_set import Call, Matmuls, Moves, capability, describe, first_reason
from pallas_kernels.mosaic.kernel_plan import (
    NO_TOP,
    ROWS,
    TREE_WORDS,
    Operands,
    Plan,
    turns_per_split,
)
from pallas_kernels.page_layouts import SEPARATE
from pallas_kernels.quantized_pages import spell_dtype
from pallas_kernels.query_tiles import QueryTiles, mask_words, query_tiles, token_rows
from pallas_kernels.sets import reference
from pallas_kernels.tiles import Shape, Tiles, find_tuned, shape_of
from pallas_kernels.xla import matmul, move, write

SHARED_BYTES = 227 * 1024  # the shared memory that a program may have on sm_90
_RESERVED_BYTES = 3072  # its part for barriers and for Mosaic's reductions
_TREE_WIDTH = 32 * TREE_WORDS


def heuristic(shape: Shape) -> Tiles:
    """Returns tiles for a shape that was not measured.

    They were never tried on a GPU, but chosen for registers, shared memory and bytes in flight.
    Chunks take two consumers and no splits, since every split writes its partial results in
    float32. Fewer query rows take one consumer.
    """
    chunk = shape.kind == "chunk"
    query_rows = 128 if chunk else 64
    context = 128 if chunk and shape.head_dim <= 128 else 64
    max_splits, split_context = {"chunk": (1, context), "verify": (4, 512), "decode": (16, 256)}[
        shape.kind
    ]
    queries = query_rows * shape.head_dim * 2
    partials = query_rows * (shape.head_dim + 2) * 4 if max_splits > 1 else 0
    buffer = 4 * context * shape.head_dim  # bytes of the keys and values of a turn
    return Tiles(
        query_rows=query_rows,
        context=context,
        max_splits=max_splits,
        split_context=split_context,
        num_warps=query_rows // 16,
        num_stages=max(1, min(5, (SHARED_BYTES - _RESERVED_BYTES - queries - partials) // buffer)),
    )


def attend(
    arguments: Arguments, *, tiles: Tiles | None = None, interpret: bool = False
) -> jax.Array:
    """Returns out_TNH in the queries' type.

    Args:
        arguments: The call.
        tiles: The tiles; by default those that were measured, or else `heuristic`.
        interpret: Simulates the GPU's threads, barriers and copies on CPU. That takes about half a
            second for each program that has something to see.
    """
    # They are imported here, since Pallas takes a quarter of a second to import and a CPU needs
    # none of it.
    from pallas_kernels.mosaic.jax_versions import mosaic_kernel
    from pallas_kernels.mosaic.kernel import entry

    tiles = tiles or find_tuned("mosaic", shape_of(arguments)) or heuristic(shape_of(arguments))
    _refuse_tiles(arguments, tiles)
    group = arguments.q_TNH.shape[1] // arguments.k_pages.shape[2]
    cut = query_tiles(arguments, min(tiles.query_tokens(group), arguments.max_query_len))
    plan = _plan(arguments, tiles, cut, interpret)
    if plan.shared_bytes + _RESERVED_BYTES > SHARED_BYTES:
        raise NotImplementedError(
            f"tiles need {plan.shared_bytes + _RESERVED_BYTES} bytes of shared memory, and a "
            f"program has {SHARED_BYTES}: "
            f"query_rows={tiles.query_rows}, context={tiles.context}, "
            f"num_stages={tiles.num_stages}, "
            f"max_splits={tiles.max_splits}, head width {plan.head_dim}"
        )
    description_R3 = _describe(arguments, cut)
    inputs = [
        _gather(arguments, plan, cut),
        arguments.k_pages,
        arguments.v_pages,
        arguments.block_table_BM.astype(jnp.int32),
        description_R3,
        *([_tree_words(arguments, plan, cut)] if plan.tree else []),
        *([_sinks(arguments, plan)] if plan.sinks else []),
    ]

    def paged_attention(*refs: Any) -> None:
        # `Operands` has a place for every array, also for one that this call does not have.
        operands = list(refs) + [None] * (plan.splits == 1)
        for place, is_present in ((5, plan.tree), (6, plan.sinks)):
            if not is_present:
                operands.insert(place, None)
        entry(plan, Operands(*operands))

    results = mosaic_kernel(
        paged_attention,
        out_type=_outputs(plan, arguments.k_pages.shape[2]),
        grid={"tile": plan.num_tiles, "head": arguments.k_pages.shape[2], "split": plan.splits},
        thread_name="warpgroup",
        num_threads=plan.consumers + 1,
        interpret=interpret,
    )(*inputs)
    out_RKXH = results[0] if plan.splits == 1 else _reduce(plan, description_R3, *results)
    return _per_token(arguments, plan, cut, out_RKXH)


def supports(device: Any, call: Call) -> str | None:
    """Returns why the set refuses a call, or None if it takes it."""
    if reason := x64_reason():
        return reason
    if call.interpret and not MOSAIC_INTERPRETABLE:
        return (
            "interpret=True, which Mosaic's kernels take from jax 0.11 on, and this is "
            f"{jax.__version__}"
        )
    if not call.interpret and capability(device) not in (None, (9, 0)):
        return (
            f"needs a GPU of compute capability 9.0, which alone has wgmma, but {describe(device)}"
        )
    return None if call.attention is None else _attention_reason(call.attention)


def _attention_reason(arguments: Arguments) -> str | None:
    dtype = arguments.q_TNH.dtype.name
    page_dtype = arguments.k_pages.dtype.name
    width = arguments.q_TNH.shape[2]
    block_size = arguments.k_pages.shape[1]
    tree = arguments.options.tree_mask_TQ
    tree_width = 0 if tree is None else tree.shape[1]
    return first_reason(
        (
            dtype not in ("bfloat16", "float16"),
            f"queries of {dtype}: wgmma's operands are bfloat16 or float16",
        ),
        (
            page_dtype != dtype,
            f"pages of {spell_dtype(page_dtype)} under queries of {dtype}: wgmma reads the pages as they lie",
        ),
        (
            width % 64 or width > 256,
            f"head width {width}: a swizzled row has 64 elements, and registers hold up to 256",
        ),
        (block_size % 8, f"block size {block_size}: a swizzled tile has 8 rows"),
        (
            tree_width > _TREE_WIDTH,
            f"tree_mask_TQ of width {tree_width}: a row's mask is kept in {_TREE_WIDTH} bits",
        ),
    )


def _refuse_tiles(arguments: Arguments, tiles: Tiles) -> None:
    group = arguments.q_TNH.shape[1] // arguments.k_pages.shape[2]
    block_size = arguments.k_pages.shape[1]
    rows = tiles.query_rows
    context = tiles.context
    reason = first_reason(
        (
            rows not in (ROWS, 2 * ROWS),
            f"tiles.query_rows={rows}: one or two consumers of {ROWS} rows each",
        ),
        (
            group > rows,
            f"{group} query heads on a key/value head, more than tiles.query_rows={rows}",
        ),
        (
            tiles.num_warps != rows // 16,
            f"tiles.num_warps={tiles.num_warps}: {ROWS} query rows take 4",
        ),
        (context % 64, f"tiles.context={context}: no multiple of 64"),
        (
            context % block_size and block_size % context,
            f"tiles.context={context}: neither a multiple nor a part of the block size, "
            f"{block_size}",
        ),
    )
    if reason:
        raise NotImplementedError(reason)


def _plan(arguments: Arguments, tiles: Tiles, cut: QueryTiles, interpret: bool) -> Plan:
    num_tiles, tokens = cut.token_RQ.shape
    group = arguments.q_TNH.shape[1] // arguments.k_pages.shape[2]
    consumers = tiles.query_rows // ROWS
    return Plan(
        consumers=consumers,
        # Rows are copied in whole swizzled tiles, which have 8 rows.
        used_rows=-(-tokens * group // 8) * 8 if consumers == 1 else tiles.query_rows,
        context=tiles.context,
        stages=tiles.num_stages,
        num_tiles=num_tiles,
        splits=tiles.max_splits,
        split_turns=tiles.split_context // tiles.context,
        group=group,
        head_dim=arguments.q_TNH.shape[2],
        block_size=arguments.k_pages.shape[1],
        table_width=arguments.block_table_BM.shape[1],
        dtype=arguments.q_TNH.dtype,
        options=arguments.options.static,
        tree=arguments.options.tree_mask_TQ is not None,
        sinks=arguments.options.sinks is not None,
        interpret=interpret,
    )


def _describe(arguments: Arguments, cut: QueryTiles) -> jax.Array:
    """Returns each tile's row, the first position of its tokens, and the last one it sees.

    The last position is -1 if there is none. With a tree mask the first position is that of the
    row's new tokens, and the last one is the last of the row.
    """
    row_R = cut.row_R
    first_R = cut.position_RQ[:, 0]
    last_R = cut.position_RQ.max(axis=1)
    if arguments.options.tree_mask_TQ is not None:
        query_len_B = arguments.query_start[1:] - arguments.query_start[:-1]
        first_R = (arguments.context_len_B - query_len_B)[row_R]
        last_R = jnp.where(last_R < 0, -1, arguments.context_len_B[row_R] - 1)
    return jnp.stack([row_R, first_R, last_R], axis=1).astype(jnp.int32)


def _gather(arguments: Arguments, plan: Plan, cut: QueryTiles) -> jax.Array:
    """Returns q_RKXH: the query rows of each tile, tokens outermost, padded with zeros to X."""
    num_tiles, tokens = cut.token_RQ.shape
    num_kv_heads = arguments.k_pages.shape[2]
    q_RQKGH = arguments.q_TNH[cut.token_RQ].reshape(
        num_tiles, tokens, num_kv_heads, plan.group, plan.head_dim
    )
    q_RKXH = q_RQKGH.swapaxes(1, 2).reshape(
        num_tiles, num_kv_heads, tokens * plan.group, plan.head_dim
    )
    return jnp.pad(q_RKXH, ((0, 0), (0, 0), (0, plan.used_rows - tokens * plan.group), (0, 0)))


def _tree_words(arguments: Arguments, plan: Plan, cut: QueryTiles) -> jax.Array:
    """Returns which new tokens of its own sequence each query row sees, 32 in a word."""
    tree_mask_TQ = arguments.options.tree_mask_TQ
    assert tree_mask_TQ is not None
    num_tokens, width = tree_mask_TQ.shape
    row_T = token_rows(arguments.context_len_B, arguments.query_start, num_tokens).row_T
    query_len_T = (arguments.query_start[1:] - arguments.query_start[:-1])[row_T]
    mask = tree_mask_TQ & (jnp.arange(width)[None, :] < query_len_T[:, None])
    words = mask_words(jnp.pad(mask, ((0, 0), (0, _TREE_WIDTH - width))))
    # All query heads of a token see the same.
    words_RXW = jnp.repeat(words[cut.token_RQ], plan.group, axis=1)
    missing = plan.consumers * ROWS - words_RXW.shape[1]
    return jnp.pad(words_RXW, ((0, 0), (0, missing), (0, 0))).swapaxes(1, 2)


def _sinks(arguments: Arguments, plan: Plan) -> jax.Array:
    """Returns the sinks of each query row of a tile, as exponents of two."""
    sinks = arguments.options.sinks
    assert sinks is not None
    sinks_KG = jnp.maximum(sinks.reshape(-1, plan.group) * math.log2(math.e), NO_TOP)
    return jnp.tile(sinks_KG, (1, -(-plan.consumers * ROWS // plan.group)))[
        :, : plan.consumers * ROWS
    ]


def _outputs(plan: Plan, num_kv_heads: int) -> list[jax.ShapeDtypeStruct]:
    if plan.splits == 1:
        return [
            jax.ShapeDtypeStruct(
                (plan.num_tiles, num_kv_heads, plan.used_rows, plan.head_dim), plan.dtype
            )
        ]
    leading = (plan.num_tiles, plan.splits, num_kv_heads)
    return [
        jax.ShapeDtypeStruct((*leading, plan.used_rows, plan.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((*leading, 2, plan.consumers * ROWS), jnp.float32),
    ]


def _reduce(
    plan: Plan, description_R3: jax.Array, acc_RZKXH: jax.Array, top_total: jax.Array
) -> jax.Array:
    """Reduces Z splits to one.

    A split without a turn wrote nothing, so its part of the memory is not read.
    """
    end_R = (description_R3[:, 2] + plan.context) // plan.context
    begin_R = jnp.zeros_like(end_R)
    if plan.options.sliding_window is not None:
        begin_R = (
            jnp.maximum(description_R3[:, 1] - (plan.options.sliding_window - 1), 0) // plan.context
        )
    each_R = turns_per_split(plan, end_R - begin_R)
    live_RZ = jnp.arange(plan.splits)[None, :] * each_R[:, None] < (end_R - begin_R)[:, None]
    live = live_RZ[:, :, None, None]
    top, total = (top_total[:, :, :, i, : plan.used_rows] for i in range(2))
    top = jnp.where(live, top, -jnp.inf)
    highest = top.max(axis=1, keepdims=True)
    # Without a live split `highest` is -inf, and -inf minus -inf would be NaN.
    weight = jnp.where(live, jnp.exp2(top - jnp.where(jnp.isfinite(highest), highest, 0.0)), 0.0)
    total_RKX = jnp.sum(jnp.where(live, total, 0.0) * weight, axis=1)
    acc_RKXH = jnp.sum(jnp.where(live[..., None], acc_RZKXH, 0.0) * weight[..., None], axis=1)
    return acc_RKXH / jnp.where(total_RKX == 0.0, 1.0, total_RKX)[..., None]


def _per_token(arguments: Arguments, plan: Plan, cut: QueryTiles, out_RKXH: jax.Array) -> jax.Array:
    tokens = cut.token_RQ.shape[1]
    num_kv_heads = out_RKXH.shape[1]
    out_RKQGH = out_RKXH[:, :, : tokens * plan.group].reshape(
        -1, num_kv_heads, tokens, plan.group, plan.head_dim
    )
    out_TKGH = out_RKQGH[cut.tile_T, :, cut.offset_T]
    # A tile that sees nothing wrote nothing.
    seen_T = cut.valid_T & (cut.position_RQ[cut.tile_T, cut.offset_T] >= 0)
    out_TNH = jnp.where(seen_T[:, None, None, None], out_TKGH, 0.0).reshape(arguments.q_TNH.shape)
    return out_TNH.astype(arguments.q_TNH.dtype)


def _as_it_is(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operation of plain XLA that accepts `interpret`: it runs on a CPU as it is."""

    @functools.wraps(operation)
    def run(*arguments: Any, interpret: bool = False) -> Any:
        return operation(*arguments)

    return run


SET = dataclasses.replace(
    reference.SET,
    name="mosaic",
    attend=attend,
    write=_as_it_is(write.write),
    moves=Moves(
        copy_blocks=_as_it_is(move.copy_blocks),
        copy_slots=_as_it_is(move.copy_slots),
        gather_blocks=_as_it_is(move.gather_blocks),
        scatter_blocks=_as_it_is(move.scatter_blocks),
    ),
    matmuls=Matmuls(multiply=_as_it_is(matmul.multiply_on_gpu)),
    honours=frozenset({"scale", "sliding_window", "logit_softcap", "sinks", "tree_mask_TQ"}),
    supports=supports,
    tiles=heuristic,
    layouts=(SEPARATE,),
    platforms=("gpu",),
    interpretable=MOSAIC_INTERPRETABLE,
    prefers_mixed_steps=True,
)
