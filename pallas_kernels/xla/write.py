"""The definition of `write_kv`: one scatter for each array."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.quantized_pages import quantize


def write(
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    k_pages: Num[Array, "P S K H"],
    v_pages: Num[Array, "P S K H"],
    slots_T: Int[Array, "T"],
    k_scale: Float[Array, "P S K"] | None,
    v_scale: Float[Array, "P S K"] | None,
) -> tuple[jax.Array, ...]:
    if k_scale is None or v_scale is None:
        return _write(k_pages, k_TKH, slots_T), _write(v_pages, v_TKH, slots_T)
    k_kept_TKH, k_scale_TK = quantize(k_TKH, k_pages.dtype)
    v_kept_TKH, v_scale_TK = quantize(v_TKH, v_pages.dtype)
    return (
        _write(k_pages, k_kept_TKH, slots_T),
        _write(v_pages, v_kept_TKH, slots_T),
        _write(k_scale, k_scale_TK, slots_T),
        _write(v_scale, v_scale_TK, slots_T),
    )


def _write(pages: Num[Array, "P S ..."], new: Num[Array, "T ..."], slots_T: Int[Array, "T"]) -> jax.Array:
    num_blocks, block_size = pages.shape[:2]
    slots = pages.reshape(num_blocks * block_size, *pages.shape[2:])
    # A slot below zero would wrap around to the end of the pool; slots are never negative, so the wrap is left out of the program.
    written = slots.at[slots_T].set(new.astype(pages.dtype), mode="drop", wrap_negative_indices=False)
    return written.reshape(pages.shape)
