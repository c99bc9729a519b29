"""A model in numpy of what flash-attn3-jax 0.2.3 does with a paged cache, in place of the library
where there is no Hopper GPU.

It was written from the library's source, not from our kernel set: queries end where the context
ends, keys that a mask hides count as minus infinity whatever they are, and their values are
multiplied by zero, so that NaN among them reaches the output.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def flash_mha_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    rotary_cos=None,
    rotary_sin=None,
    softmax_scale=None,
    is_causal=False,
    window_size=(-1, -1),
    num_splits=1,
    return_softmax_lse=False,
):
    """Computes attention as the library of that name does.

    q: (batch, queries, heads, width). Pages: (blocks, block size, key/value heads, width). Lengths:
    (batch,).
    """
    unused = (k, v, cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin)
    assert (
        all(each is None for each in unused)
        and window_size == (-1, -1)
        and isinstance(softmax_scale, float)
    )
    assert q.dtype == k_cache.dtype == v_cache.dtype and q.dtype in (jnp.bfloat16, jnp.float16)
    assert (
        q.ndim == k_cache.ndim == 4
        and k_cache.shape == v_cache.shape
        and q.shape[3] == k_cache.shape[3] == 128
    )
    assert page_table.dtype == cache_seqlens.dtype == jnp.int32
    assert page_table.shape[0] == cache_seqlens.shape[0] == q.shape[0]
    assert num_splits == 1, "with more, how many a row gets depends on the other rows"
    assert is_causal

    def run(*arrays):
        return _attend(*(np.asarray(array) for array in arrays), softmax_scale)

    batch, queries, heads, _ = q.shape
    shapes = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
    )
    out, lse = jax.pure_callback(run, shapes, q, k_cache, v_cache, cache_seqlens, page_table)
    return (out, lse) if return_softmax_lse else out


def _attend(q, k_pages, v_pages, lengths, tables, scale):
    batch, queries, heads, width = q.shape
    num_blocks, block_size, kv_heads, _ = k_pages.shape
    out = np.zeros(q.shape, np.float32)
    lse = np.full((batch, heads, queries), -np.inf, np.float32)
    for row, length in enumerate(lengths):
        assert 0 <= length <= tables.shape[1] * block_size
        blocks = tables[row, : -(-length // block_size)]
        assert ((blocks >= 0) & (blocks < num_blocks)).all()
        keys, values = (
            pages[blocks].reshape(-1, kv_heads, width)[:length].astype(np.float32)
            for pages in (k_pages, v_pages)
        )
        seen = np.arange(length)[None, :] <= np.arange(length - queries, length)[:, None]
        for head in range(heads if length else 0):
            kv_head = head // (heads // kv_heads)
            scores = np.where(
                seen, q[row, :, head].astype(np.float32) @ keys[:, kv_head].T * scale, -np.inf
            )
            top = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
            total = weights.sum(axis=1)
            out[row, :, head] = (
                weights @ values[:, kv_head] / np.where(total == 0, 1, total)[:, None]
            )
            with np.errstate(divide="ignore"):
                lse[row, head] = np.where(total == 0, -np.inf, top[:, 0] + np.log(total))
    return out.astype(q.dtype), lse
