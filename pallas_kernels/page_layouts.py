"""Defines the two layouts of a layer's pages, and the way from one to the other.

Separate pages are an array of keys and one of values, each [P, S, K, H]. Interleaved pages are one
array [P, S, 2K, W] in which the value of each head follows its key. They are made for TPUs, which
keep an array in tiles of 128 numbers: narrower heads have zeros up to W, a multiple of 128, which
takes no more memory than the tiles would. They are never quantised. The operations that move blocks
and slots need not know the layout.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_pages import is_quantized

SEPARATE = "separate"
INTERLEAVED = "interleaved"
LANES = 128  # the numbers of a row of a TPU's tile


def interleaved_width(head_dim: int) -> int:
    """Returns the width of interleaved pages (W) for heads of a width (H)."""
    return -(-head_dim // LANES) * LANES


def fill_up(x: jax.Array, width: int) -> jax.Array:
    """Returns vectors [..., H] with zeros up to a width."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def interleave(k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns keys and values, each [..., K, H], as one array [..., 2K, W]."""
    width = interleaved_width(k.shape[-1])
    stacked = fill_up(jnp.stack([k, v], axis=-2), width)
    return stacked.reshape(*k.shape[:-2], 2 * k.shape[-2], width)


def separate(kv: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Returns the keys and the values, each [..., K, H], of an array [..., 2K, W]."""
    pairs = kv[..., :head_dim].reshape(*kv.shape[:-2], kv.shape[-2] // 2, 2, head_dim)
    return pairs[..., 0, :], pairs[..., 1, :]


def check_interleaved(k_pages: Any, v_pages: Any | None, k_scale: Any | None) -> None:
    """Checks that an array can be interleaved pages.

    Raises:
        ValueError: There are other pages or scales next to it, its number of heads is odd, its
            width is no multiple of 128, or its type has scales.
    """
    if v_pages is not None or k_scale is not None:
        raise ValueError("interleaved pages are one array: v_pages and k_scale must not be given")
    if k_pages.shape[2] % 2:
        raise ValueError(
            "interleaved pages have a key and a value for each head, but the shape of k_pages is "
            f"{k_pages.shape}"
        )
    if k_pages.shape[3] % LANES:
        raise ValueError(
            f"interleaved pages are a multiple of {LANES} wide, but the shape of k_pages is "
            f"{k_pages.shape}"
        )
    if is_quantized(k_pages.dtype):
        raise ValueError(f"interleaved pages are not quantised, but k_pages hold {k_pages.dtype}")
