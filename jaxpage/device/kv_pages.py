"""The keys and values on the device: one donated pytree, two arrays per layer, block 0 being the null block that takes padding."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpage.models.base import KVSpec


class LayerPages(NamedTuple):
    """One layer's blocks, in the layout of the kernels."""

    k_pages: jax.Array  # [P, S, K, H]
    v_pages: jax.Array  # [P, S, K, H]


KVPages = tuple[LayerPages, ...]


def bytes_per_block(kv: KVSpec, block_size: int, dtype: DTypeLike) -> int:
    return 2 * kv.num_layers * block_size * kv.num_kv_heads * kv.head_width * jnp.dtype(dtype).itemsize


def page_shapes(kv: KVSpec, num_blocks: int, block_size: int, dtype: DTypeLike) -> KVPages:
    """The pages as shapes, for compiling ahead of time."""
    page = jax.ShapeDtypeStruct((num_blocks, block_size, kv.num_kv_heads, kv.head_width), dtype)
    return tuple(LayerPages(page, page) for _ in range(kv.num_layers))  # type: ignore[arg-type]


def allocate(kv: KVSpec, num_blocks: int, block_size: int, dtype: DTypeLike) -> KVPages:
    return jax.tree.map(lambda page: jnp.zeros(page.shape, page.dtype), page_shapes(kv, num_blocks, block_size, dtype))
