"""Writes keys, values and their scales (`write_kv`) with one launch of a Triton kernel.

A program takes some heads of one token. `quantized_pages` defines how numbers are quantised; here
it is done with operations that Triton has, and the results have the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.quantized_pages import MIN_SCALE, largest
from pallas_kernels.triton import backend
from pallas_kernels.triton.backend import load, store

# The elements of a program's keys, and of its values: 8 warps move them with few registers.
TILE = 2048
TO_INTEGER = np.float32(1.5 * 2**23)
WARP_BYTES = 32 * 16  # a warp stores so many bytes at once


def write(
    k_TKH: jax.Array,
    v_TKH: jax.Array | None,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    slots_T: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array | None, ...]:
    """Writes keys and values into pages; see `pallas_kernels.write_kv`."""
    new, pages, scales = (
        [array for array in pair if array is not None]
        for pair in ((k_TKH, v_TKH), (k_pages, v_pages), (k_scale, v_scale))
    )
    outputs = [*pages, *scales]
    num_tokens, num_heads, width = k_TKH.shape
    if num_tokens == 0:
        return _in_places(outputs, len(new))
    # Triton's vectors are powers of two long; masks leave out the rest.
    padded_width = pl.next_power_of_2(width)
    heads = max(1, min(pl.next_power_of_2(num_heads), TILE // padded_width))
    tile_bytes = heads * padded_width * k_pages.dtype.itemsize
    call = backend.kernel_call(
        functools.partial(_kernel, num_new=len(new), heads=heads, padded_width=padded_width),
        name="write_kv",
        grid=(num_tokens, pl.cdiv(num_heads, heads)),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in outputs],
        # The slots and the new arrays come before the pages in the operands.
        input_output_aliases={1 + len(new) + index: index for index in range(len(outputs))},
        num_warps=max(1, min(8, tile_bytes // WARP_BYTES)),
        num_stages=1,  # the kernel has no loop
        interpret=interpret,
    )
    return _in_places(call(slots_T, *new, *outputs), len(new))


def _in_places(outputs: Sequence[jax.Array], num_new: int) -> tuple[jax.Array | None, ...]:
    """Returns the pages as `write_kv` does, with None for values that are within the keys."""
    return (
        tuple(outputs)
        if num_new == 2
        else tuple(place for each in outputs for place in (each, None))
    )


def _kernel(slots_ref, *refs, num_new: int, heads: int, padded_width: int):  # type: ignore[no-untyped-def]
    new_refs = refs[:num_new]
    kept_refs = refs[num_new:]
    out_refs = kept_refs[len(kept_refs) // 2 :]  # they alias the first half
    scale_refs = out_refs[num_new:] or (None,) * num_new
    num_blocks, block_size, num_heads, width = out_refs[0].shape
    token = pl.program_id(0)
    slot = load(slots_ref.at[token])
    head = pl.program_id(1) * heads + jnp.arange(heads)
    column = jnp.arange(padded_width)
    head_mask = head < num_heads if num_heads % heads else None
    mask = _both(head_mask, column < width if width < padded_width else None)

    @pl.when((slot >= 0) & (slot < num_blocks * block_size))
    def _write() -> None:
        block = jax.lax.div(slot, block_size)
        offset = jax.lax.rem(slot, block_size)
        # It is not strict, because `out_refs` has the scales after the pages.
        for new_ref, pages_ref, scale_ref in zip(new_refs, out_refs, scale_refs, strict=False):
            other = None if mask is None else 0.0
            x = load(new_ref.at[token, head[:, None], column[None, :]], mask=mask, other=other)
            if scale_ref is not None:
                x, scale = quantize(x.astype(jnp.float32), pages_ref.dtype)
                store(scale_ref.at[block, offset, head], scale, mask=head_mask)
            store(
                pages_ref.at[block, offset, head[:, None], column[None, :]],
                x.astype(pages_ref.dtype),
                mask=mask,
            )


def _both(head_mask: jax.Array | None, column_mask: jax.Array | None) -> jax.Array | None:
    if head_mask is None or column_mask is None:
        return (
            head_mask[:, None]
            if head_mask is not None
            else None
            if column_mask is None
            else column_mask[None, :]
        )
    return head_mask[:, None] & column_mask[None, :]


def quantize(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Quantises a tile of float32 as `quantized_pages.quantize` does.

    Triton has no rounding, and no maximum that keeps NaN.
    """
    # Read as integers, magnitudes have the order of the numbers, with NaN above them all.
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    scale = jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32) * np.float32(
        1.0 / largest(dtype)
    )
    scale = jnp.where(scale < MIN_SCALE, np.float32(MIN_SCALE), scale)
    scaled = x / scale[:, None]
    if dtype == jnp.int8:
        # The floats from 2**23 to 2**24 are the integers, so the sum is rounded to an integer, ties
        # to even. Its bits are read because XLA could cancel an addition and a subtraction.
        rounded = jax.lax.bitcast_convert_type(scaled + TO_INTEGER, jnp.int32) - np.int32(
            TO_INTEGER.view(np.int32)
        )
        # NaN has no code. Zero times its scale, which is not finite, is read as NaN again.
        return jnp.where(scaled == scaled, rounded, 0).astype(jnp.int8), scale
    return jax.lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), dtype), scale
