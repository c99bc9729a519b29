"""Defines how keys and values are written (`write_kv`): by one scatter for each array."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.page_layouts import interleave
from pallas_kernels.quantized_pages import quantize


def write(
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"] | None,
    k_pages: Num[Array, "P S K H"],
    v_pages: Num[Array, "P S K H"] | None,
    slots_T: Int[Array, "T"],
    k_scale: Float[Array, "P S K"] | None,
    v_scale: Float[Array, "P S K"] | None,
) -> tuple[jax.Array | None, ...]:
    """Writes keys and values into pages; see `pallas_kernels.write_kv`."""
    if v_TKH is not None and v_pages is None:
        return _write(k_pages, interleave(k_TKH, v_TKH), slots_T), None
    new_k_pages, new_k_scale = _write_pages(k_pages, k_scale, k_TKH, slots_T)
    new_v_pages = new_v_scale = None
    if v_TKH is not None and v_pages is not None:
        new_v_pages, new_v_scale = _write_pages(v_pages, v_scale, v_TKH, slots_T)
    pages = new_k_pages, new_v_pages
    return pages if k_scale is None else (*pages, new_k_scale, new_v_scale)


def _write_pages(
    pages: jax.Array, scale: jax.Array | None, new_TKH: jax.Array, slots_T: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    if scale is None:
        return _write(pages, new_TKH, slots_T), None
    stored_TKH, scale_TK = quantize(new_TKH, pages.dtype)
    return _write(pages, stored_TKH, slots_T), _write(scale, scale_TK, slots_T)


def _write(
    pages: Num[Array, "P S ..."], new: Num[Array, "T ..."], slots_T: Int[Array, "T"]
) -> jax.Array:
    num_blocks, block_size = pages.shape[:2]
    slots = pages.reshape(num_blocks * block_size, *pages.shape[2:])
    # Slots are never negative, so the program needs no wrap to the end of the pool.
    written = slots.at[slots_T].set(
        new.astype(pages.dtype), mode="drop", wrap_negative_indices=False
    )
    return written.reshape(pages.shape)
