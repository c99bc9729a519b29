"""Defines the two layouts of a layer's pages, and the way from one to the other.

Separate pages are an array of keys and one of values, each [P, S, K, H]. Interleaved pages are one
array [P, S, 2K, H] in which the value of each head follows its key; they are never quantised. The
operations that move blocks and slots need not know the layout.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_pages import is_quantized

SEPARATE = "separate"
INTERLEAVED = "interleaved"


def interleave(k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns keys and values, each [..., K, H], as one array [..., 2K, H]."""
    return jnp.stack([k, v], axis=-2).reshape(*k.shape[:-2], 2 * k.shape[-2], k.shape[-1])


def separate(kv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the keys and the values of an array [..., 2K, H]."""
    pairs = kv.reshape(*kv.shape[:-2], kv.shape[-2] // 2, 2, kv.shape[-1])
    return pairs[..., 0, :], pairs[..., 1, :]


def check_interleaved(k_pages: Any, v_pages: Any | None, k_scale: Any | None) -> None:
    """Checks that an array can be interleaved pages.

    Raises:
        ValueError: There are other pages or scales next to it, its number of heads is odd, or its
            type has scales.
    """
    if v_pages is not None or k_scale is not None:
        raise ValueError("interleaved pages are one array: v_pages and k_scale must not be given")
    if k_pages.shape[2] % 2:
        raise ValueError(
            "interleaved pages have a key and a value for each head, but the shape of k_pages is "
            f"{k_pages.shape}"
        )
    if is_quantized(k_pages.dtype):
        raise ValueError(f"interleaved pages are not quantised, but k_pages hold {k_pages.dtype}")
