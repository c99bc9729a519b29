"""Splits a product into queries, keys and values, rotates, and writes pages, in one launch.

A program takes some heads of one token, which are all queries, all keys or all values. Its numbers
are those of `rows.split_and_rotate` followed by `write.write`, to the bit. With norms a program
takes one head, which it adds up as `rows.rms_norm` adds up a row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton import backend
from pallas_kernels.triton.backend import load, store
from pallas_kernels.triton.rows import fold_segments, warps_of
from pallas_kernels.triton.write import TILE, WARP_BYTES, quantize


@functools.partial(jax.jit, static_argnames=("dtype", "epsilon", "offset", "interpret"))
def rotate_and_write(
    x_TMH: jax.Array,
    cos_TE: jax.Array,
    sin_TE: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slots_T: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    query_scale_H: jax.Array | None,
    key_scale_H: jax.Array | None,
    *,
    dtype: str,
    epsilon: float,
    offset: float,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns rotated queries, and the pages; see `pallas_kernels.rotate_and_write`."""
    num_tokens, num_all, width = x_TMH.shape[-3:]
    num_keys = k_pages.shape[2]
    num_queries = num_all - 2 * num_keys
    padded_width = pl.next_power_of_2(width)
    alike = math.gcd(num_queries, num_keys)
    # The largest power of two that divides both numbers of heads, so that the heads of a program
    # are of one kind.
    heads = min(alike & -alike, max(1, TILE // padded_width))
    num_warps = max(1, min(8, heads * padded_width * jnp.dtype(dtype).itemsize // WARP_BYTES))
    if query_scale_H is not None:
        heads, num_warps = 1, warps_of(width)
    pages = [array for array in (k_pages, v_pages, k_scale, v_scale) if array is not None]
    shapes = [jax.ShapeDtypeStruct((num_tokens, num_queries, width), dtype)]
    shapes += [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in pages]
    body = functools.partial(
        _kernel,
        num_pages=len(pages),
        heads=heads,
        padded_width=padded_width,
        epsilon=epsilon,
        offset=offset,
    )
    call = backend.kernel_call(
        body,
        name="rotate_and_write",
        grid=(num_tokens, num_all // heads),
        out_shape=shapes,
        # Four operands come before the pages, and the queries before them in the results.
        input_output_aliases={4 + index: 1 + index for index in range(len(pages))},
        num_warps=num_warps,
        num_stages=1,  # the kernel has no loop
        interpret=interpret,
    )
    return tuple(call(x_TMH, cos_TE, sin_TE, slots_T, *pages, query_scale_H, key_scale_H))


def _kernel(
    x_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    slots_ref: Any,
    *refs: Any,
    num_pages: int,
    heads: int,
    padded_width: int,
    epsilon: float,
    offset: float,
) -> None:
    # The last pages alias those before.
    query_scale_ref, key_scale_ref, q_ref, *page_refs = refs[num_pages:]
    num_blocks, block_size, num_keys, width = page_refs[0].shape
    num_queries = q_ref.shape[1]
    token = pl.program_id(0)
    head = pl.program_id(1) * heads
    at_M1 = head + jnp.arange(heads)[:, None]
    at_1H = jnp.arange(padded_width)[None, :]
    has_1H = at_1H < width if width < padded_width else None
    # As they are: numbers of values, which are not rotated, keep all bits, those of NaN too.
    x_MH = fold_segments(x_ref, q_ref.dtype, (token, at_M1, at_1H), has_1H)
    norm = _identity
    if query_scale_ref is not None:
        wide_MH = x_MH.astype(jnp.float32)
        norm = functools.partial(
            _scale_head,
            inverse=jax.lax.rsqrt(jnp.sum(wide_MH * wide_MH) / width + epsilon),
            scale_refs=(query_scale_ref, key_scale_ref),
            is_query=head < num_queries,
            offset=offset,
        )
    rotated_MH = _turn(x_MH, x_ref, cos_ref, sin_ref, token, at_M1, at_1H, norm)

    @pl.when(head < num_queries)
    def _store_queries() -> None:
        store(q_ref.at[token, at_M1, at_1H], rotated_MH, mask=has_1H)

    slot = load(slots_ref.at[token])
    is_written = (slot >= 0) & (slot < num_blocks * block_size)
    block = jax.lax.div(slot, block_size)
    in_block = jax.lax.rem(slot, block_size)

    def write(place: int, numbers_MH: jax.Array) -> None:
        """Writes heads into the pages of keys, with place 0, or of values."""
        first = num_queries + place * num_keys

        @pl.when(is_written & (head >= first) & (head < first + num_keys))
        def _write() -> None:
            pages_ref = page_refs[place]
            at_K1 = at_M1 - first
            stored_MH = numbers_MH
            if num_pages == 4:
                stored_MH, scale_M = quantize(numbers_MH.astype(jnp.float32), pages_ref.dtype)
                key = head - first + jnp.arange(heads)
                store(page_refs[2 + place].at[block, in_block, key], scale_M)
            stored_MH = stored_MH.astype(pages_ref.dtype)
            store(pages_ref.at[block, in_block, at_K1, at_1H], stored_MH, mask=has_1H)

    write(0, rotated_MH)
    write(1, x_MH)


def _turn(
    x_MH: jax.Array,
    x_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    token: Any,
    at_M1: jax.Array,
    at_1H: jax.Array,
    norm: Callable[[jax.Array, jax.Array, Any], jax.Array],
) -> jax.Array:
    """Returns heads with the pairs (i, E + i) turned; what is after the pairs stays.

    What is turned is the norm of the heads: a function of some of their numbers, of the places of
    these, and of the mask of places that there are.
    """
    num_pairs = cos_ref.shape[1]
    is_rotated_1H = at_1H < 2 * num_pairs
    is_second_1H = at_1H >= num_pairs
    pair_1H = jnp.where(is_second_1H, at_1H - num_pairs, at_1H)
    other_1H = jnp.where(is_second_1H, at_1H - num_pairs, at_1H + num_pairs)
    cos_1H, sin_1H = (
        load(ref.at[token, pair_1H], mask=is_rotated_1H, other=0.0) for ref in (cos_ref, sin_ref)
    )
    # The other number of a pair is read again, since it may be in the registers of another thread.
    across_MH = fold_segments(x_ref, x_MH.dtype, (token, at_M1, other_1H), is_rotated_1H)
    across_MH = norm(across_MH, other_1H, is_rotated_1H).astype(jnp.float32) * sin_1H
    x_MH = norm(x_MH, at_1H, at_1H < x_ref.shape[-1])
    rotated_MH = x_MH.astype(jnp.float32) * cos_1H
    rotated_MH = rotated_MH + jnp.where(is_second_1H, across_MH, -across_MH)
    return jnp.where(is_rotated_1H, rotated_MH.astype(x_MH.dtype), x_MH)


def _identity(x_MH: jax.Array, at_1H: jax.Array, has_1H: Any) -> jax.Array:
    return x_MH


def _scale_head(
    x_MH: jax.Array,
    at_1H: jax.Array,
    has_1H: Any,
    *,
    inverse: jax.Array,
    scale_refs: tuple[Any, Any],
    is_query: Any,
    offset: float,
) -> jax.Array:
    """Returns the norm of numbers of a head that are at these places, rounded."""
    query_1H, key_1H = (
        load(ref.at[at_1H], mask=has_1H, other=0).astype(jnp.float32) for ref in scale_refs
    )
    scale_1H = jnp.where(is_query, query_1H, key_1H)
    normed_MH = x_MH.astype(jnp.float32) * inverse * (scale_1H + offset if offset else scale_1H)
    return normed_MH.astype(x_MH.dtype)
