"""Defines the kernel set of FlashAttention-3 on Hopper, by its JAX binding, flash-attn3-jax.

It has only attention, for decode, chains of drafts and prompt chunks, in any mixture. The set
`mosaic` writes and moves pages for it. The binding takes rows of equally many query tokens, so the
ragged stream is cut into tiles, and each tile is a row of the call:

    stream   a0 | b0 b1 b2 b3 b4          block tables   a: [7]   b: [3 9]      tiles of 4 tokens
    call     [ .  .  .  a0]   page table [7]      cache_seqlens: the context up to a0
             [b0 b1 b2 b3]    page table [3 9]    ... up to b3
             [ .  .  .  b4]   page table [3 9]    ... up to b4

The kernel's causal order ends at the end of the context, so tokens are at the end of their tile. In
decode a tile is a token, and each split of its context is a row of the call too; the results are
combined by the logarithms of their sums. The kernel's own splits (`num_splits`) are never used: how
many a row gets would depend on the length of all other rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arguments
from pallas_kernels.compat import x64_reason
from pallas_kernels.kernel_set import Call, capability, describe, first_reason
from pallas_kernels.quantized_pages import spell_dtype
from pallas_kernels.query_tiles import query_cut
from pallas_kernels.sets import mosaic
from pallas_kernels.tiles import Shape, Tiles, find_tuned, shape_of

HEAD_DIM = 128  # the published binaries have only this one
# A program of the library multiplies so many query rows and positions at once.
ROWS = 128
CONTEXT = 128
_OF_THE_LIBRARY = {"context": CONTEXT, "num_warps": 8, "num_stages": 2}
INSTALL = "pip install flash-attn3-jax (Linux on x86-64; it is also the extra jaxpage[fa3])"


@functools.cache
def library() -> tuple[Callable[..., Any] | None, str]:
    """Returns `flash_mha_with_kvcache`, or None and the reason why there is none."""
    try:
        from flash_attn3_jax import flash_mha_with_kvcache
    except Exception as failure:
        # A JAX that is newer than the package may fail its import in any way, and other sets can
        # take the call.
        return (
            None,
            f"FlashAttention-3 cannot be imported ({type(failure).__name__}: {failure}): {INSTALL}",
        )
    return flash_mha_with_kvcache, ""


def heuristic(shape: Shape) -> Tiles:
    """Returns tiles for a shape that was not measured.

    Only `query_rows` and the splits can be chosen; the library is compiled for the others.
    """
    return Tiles(
        query_rows=ROWS,
        max_splits=16 if shape.kind == "decode" else 1,
        split_context=512,
        **_OF_THE_LIBRARY,
    )


def attend(arguments: Arguments, *, tiles: Tiles | None = None) -> jax.Array:
    """Returns out_TNH in the queries' type."""
    kernel, reason = library()
    if kernel is None:
        raise NotImplementedError(reason)
    shape = shape_of(arguments)
    tiles = tiles or find_tuned("fa3", shape) or heuristic(shape)
    _refuse_tiles(arguments, tiles)
    return _attend(arguments, kernel=kernel, tiles=tiles)


# It is traced and lowered once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("kernel", "tiles"))
def _attend(arguments: Arguments, *, kernel: Callable[..., Any], tiles: Tiles) -> jax.Array:
    tokens = min(tiles.query_tokens(shape_of(arguments).group), arguments.max_query_len)
    cut = query_cut(arguments, tokens)
    missing_R = tokens - cut.count_R
    token_RQ = (cut.token_R - missing_R)[:, None] + jnp.arange(tokens)
    q_RQNH = arguments.q_TNH[jnp.clip(token_RQ, 0, arguments.q_TNH.shape[0] - 1)]
    end_R = jnp.where(cut.count_R > 0, jnp.maximum(cut.position_R + cut.count_R, 0), 0)
    table_RM = arguments.block_table_BM[cut.row_R]
    call = functools.partial(
        kernel,
        k_cache=arguments.k_pages,
        v_cache=arguments.v_pages,
        softmax_scale=arguments.options.scale,
        is_causal=True,
        num_splits=1,
    )
    out_RQNH = _attend_in_splits(call, q_RQNH, end_R, table_RM, arguments.k_pages.shape[1], tiles)
    seen_T = cut.valid_T & (cut.position_R[cut.tile_T] + cut.offset_T >= 0)
    out_TNH = out_RQNH[cut.tile_T, jnp.clip(missing_R[cut.tile_T] + cut.offset_T, 0, tokens - 1)]
    return jnp.where(seen_T[:, None, None], out_TNH, 0).astype(arguments.q_TNH.dtype)


def _attend_in_splits(
    call: Callable[..., Any],
    q_RQNH: jax.Array,
    end_R: jax.Array,
    table_RM: jax.Array,
    block_size: int,
    tiles: Tiles,
) -> jax.Array:
    """Returns out_RQNH; the ends of splits depend only on the row's own context."""
    num_rows, table_width = table_RM.shape
    # A split ends where a block ends, and a turn of the library at best.
    unit = block_size * -(-CONTEXT // block_size)
    minimum = _round_up(tiles.split_context, unit)
    num_splits = min(tiles.max_splits, -(-table_width * block_size // minimum))
    if num_splits == 1:
        out: jax.Array = call(q_RQNH, cache_seqlens=end_R, page_table=table_RM)
        return out
    share_R = jnp.maximum(_round_up(-(-end_R // tiles.max_splits), unit), minimum)
    max_length = max(_round_up(-(-table_width * block_size // tiles.max_splits), unit), minimum)
    start_RZ = share_R[:, None] * jnp.arange(num_splits)
    length_RZ = jnp.clip(end_R[:, None] - start_RZ, 0, share_R[:, None])
    index_RZW = start_RZ[:, :, None] // block_size + jnp.arange(
        min(max_length // block_size, table_width)
    )
    index_RW = jnp.minimum(index_RZW, table_width - 1).reshape(num_rows, -1)
    table_XW = jnp.take_along_axis(table_RM, index_RW, axis=1).reshape(num_rows * num_splits, -1)
    out_XQNH, lse_XNQ = call(
        jnp.repeat(q_RQNH, num_splits, axis=0),
        cache_seqlens=length_RZ.reshape(-1),
        page_table=table_XW,
        return_softmax_lse=True,
    )
    out_RZNH = out_XQNH.reshape(num_rows, num_splits, *q_RQNH.shape[2:])
    return _put_together(out_RZNH, lse_XNQ.reshape(num_rows, num_splits, -1), length_RZ > 0)[
        :, None
    ]


def _put_together(out_RZNH: jax.Array, lse_RZN: jax.Array, live_RZ: jax.Array) -> jax.Array:
    """Adds up the splits in float32, one after the other, so that empty splits change no bit."""
    lse_RZN = jnp.where(live_RZ[:, :, None], lse_RZN, -jnp.inf)
    top_RN = lse_RZN.max(axis=1)
    weight_RZN = jnp.exp(lse_RZN - jnp.where(jnp.isfinite(top_RN), top_RN, 0.0)[:, None])
    total_RN = jnp.zeros_like(top_RN)
    sum_RNH = jnp.zeros(out_RZNH[:, 0].shape, jnp.float32)
    for split in range(out_RZNH.shape[1]):
        total_RN += weight_RZN[:, split]
        sum_RNH += weight_RZN[:, split, :, None] * jnp.where(
            live_RZ[:, split, None, None], out_RZNH[:, split], 0
        )
    return sum_RNH / jnp.where(total_RN == 0.0, 1.0, total_RN)[..., None]


def _round_up(length: Any, unit: int) -> Any:
    return -(-length // unit) * unit


def _refuse_tiles(arguments: Arguments, tiles: Tiles) -> None:
    fixed = ((name, getattr(tiles, name), value) for name, value in _OF_THE_LIBRARY.items())
    reason = first_reason(
        *(
            (
                value_of_call != value,
                f"tiles.{name}={value_of_call}: the library is compiled for {value}",
            )
            for name, value_of_call, value in fixed
        ),
        (
            tiles.query_rows > ROWS,
            f"tiles.query_rows={tiles.query_rows}: a program of the library takes {ROWS} query "
            "rows",
        ),
        (
            tiles.max_splits > 1 and arguments.max_query_len > 1,
            f"tiles.max_splits={tiles.max_splits}: contexts are split where rows have one query "
            "token",
        ),
    )
    if reason:
        raise NotImplementedError(reason)


def supports(device: Any, call: Call) -> str | None:
    """Returns why the set refuses a call, or None if it takes it."""
    if call.interpret:
        return "interpret=True: it is a library for GPUs, and nothing interprets it"
    if capability(device) not in (None, (9, 0)):
        return f"needs a GPU of compute capability 9.0 (Hopper), but {describe(device)}"
    return (
        library()[1]
        or x64_reason()
        or (None if call.attention is None else _attention_reason(call.attention))
    )


def _attention_reason(arguments: Arguments) -> str | None:
    dtype = arguments.q_TNH.dtype.name
    page_dtype = arguments.k_pages.dtype.name
    width = arguments.q_TNH.shape[2]
    group = arguments.q_TNH.shape[1] // arguments.k_pages.shape[2]
    return first_reason(
        (dtype not in ("bfloat16", "float16"), f"q_TNH of {dtype} (only bfloat16, float16)"),
        (
            page_dtype != dtype,
            f"k_pages of {spell_dtype(page_dtype)} under q_TNH of {dtype} (only the queries' type)",
        ),
        (width != HEAD_DIM, f"heads {width} wide: the library is compiled for {HEAD_DIM}"),
        (group > ROWS, f"q_TNH with {group} heads for one of k_pages (up to {ROWS} only)"),
    )


SET = dataclasses.replace(
    mosaic.SET,
    name="fa3",
    attend=attend,
    # The library's masks are causal, and it is compiled without softcap. It has windows, but it
    # multiplies the values that a mask hides by zero: what lies before a window would have to be
    # finite, and the null block may hold anything, even NaN.
    honours=frozenset({"scale"}),
    supports=supports,
    tiles=heuristic,
    comes_first=("chunk",),
    interpretable=False,
)
