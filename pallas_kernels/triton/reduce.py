"""Combines the splits of a context: the second kernel of attention in the Triton backend."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton import backend as tb


def reduce_splits(
    out_ZTNH: jax.Array,
    top_ZTN: jax.Array,
    splits_T: jax.Array,
    dtype: jnp.dtype,
    *,
    interpret: bool,
) -> jax.Array:
    """Returns out_TNH in `dtype`.

    Args:
        out_ZTNH: The normalised outputs of Z splits in float32.
        top_ZTN: The logarithms (to base 2) of their weights in float32.
        splits_T: The number of splits of each token. Later splits are never read; a token without
            splits gets zeros.
        dtype: The type of the result.
        interpret: Runs the kernel on CPU.
    """
    max_splits, num_tokens, num_heads, width = out_ZTNH.shape
    call = tb.kernel_call(
        functools.partial(_kernel, max_splits=max_splits, width=width),
        name="paged_attention_reduce",
        grid=(num_tokens, num_heads),
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_heads, width), dtype),
        num_warps=1 if max_splits * width <= 512 else 4,
        num_stages=1,
        interpret=interpret,
    )
    out: jax.Array = call(out_ZTNH, top_ZTN, splits_T)
    return out


def _kernel(out_ref, top_ref, splits_ref, reduced_ref, *, max_splits: int, width: int) -> None:  # type: ignore[no-untyped-def]
    token = pl.program_id(0)
    head = pl.program_id(1)
    split_Z = jnp.arange(pl.next_power_of_2(max_splits))
    at_H = jnp.arange(pl.next_power_of_2(width))
    has_Z = split_Z < tb.load(splits_ref.at[token])
    top_Z = tb.load(top_ref.at[split_Z, token, head], mask=has_Z, other=-jnp.inf)
    mask_ZH = has_Z[:, None] & (at_H < width)[None, :]
    out_ZH = tb.load(
        out_ref.at[split_Z[:, None], token, head, at_H[None, :]], mask=mask_ZH, other=0.0
    )
    # Without the bound, a token without splits would get infinity minus infinity.
    weight_Z = jnp.exp2(top_Z - jnp.maximum(jnp.max(top_Z), -1e38))
    total = jnp.sum(weight_Z)
    out_H = jnp.sum(out_ZH * weight_Z[:, None], axis=0) / jnp.where(total == 0.0, 1.0, total)
    tb.store(reduced_ref.at[token, head, at_H], out_H.astype(reduced_ref.dtype), mask=at_H < width)
