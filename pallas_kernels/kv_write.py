"""Writes a step's new keys and values into their slots. Donate the pages and the write happens in place."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int


def write_kv(
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    k_pages: Float[Array, "P S K H"],
    v_pages: Float[Array, "P S K H"],
    slots_T: Int[Array, "T"],
) -> tuple[Float[Array, "P S K H"], Float[Array, "P S K H"]]:
    """Returns the pages with token t's key and value at slot `slots_T[t]` (block * S + offset), cast to the pages' type.

    Padding tokens name a slot of the null block. Slots are not checked on the device, where JAX would drop or clamp a wrong one:
    the host must.
    """
    return _write(k_pages, k_TKH, slots_T), _write(v_pages, v_TKH, slots_T)


def _write(pages: Float[Array, "P S K H"], new_TKH: Float[Array, "T K H"], slots_T: Int[Array, "T"]) -> jax.Array:
    num_blocks, block_size = pages.shape[:2]
    slots = pages.reshape(num_blocks * block_size, *pages.shape[2:])
    # A slot below zero would wrap around to the end of the pool; slots are never negative, so the wrap is left out of the program.
    written = slots.at[slots_T].set(new_TKH.astype(pages.dtype), mode="drop", wrap_negative_indices=False)
    return written.reshape(pages.shape)
