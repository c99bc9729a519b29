"""Combines the splits of a context: the second kernel of attention in the Triton backend."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.triton import backend as tb

# A running maximum starts here. It is finite, so that a masked score, minus infinity, is below it.
LOWEST = -1e30
LOG2_E = math.log2(math.e)
HEADS = 4  # of a program that adds up splits in order

Softmax = tuple[jax.Array, jax.Array, jax.Array]  # the maximum, the sum of weights, that of values


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


def start(sinks_ref, head_A: jax.Array, used_A: jax.Array) -> tuple[jax.Array, jax.Array]:  # type: ignore[no-untyped-def]
    """Returns the maximum and the sum of a softmax before its first turn, with the sinks."""
    if sinks_ref is None:
        return jnp.full(head_A.shape, LOWEST), jnp.zeros(head_A.shape)
    sink_A = tb.load(sinks_ref.at[head_A], mask=used_A, other=-jnp.inf) * LOG2_E
    top_A = jnp.maximum(sink_A, LOWEST)
    return top_A, jnp.where(top_A > LOWEST, 1.0, 0.0)


def fold(total: Softmax, segment: Softmax, exp2_of: Callable[..., jax.Array]) -> Softmax:
    """Returns the softmax over the segments of a context and the one after them."""
    top_A, total_A, sum_AH = total
    next_top_A, next_total_A, next_sum_AH = segment
    new_top_A = jnp.maximum(top_A, next_top_A)
    old_A = exp2_of(top_A, 1.0, new_top_A)
    new_A = exp2_of(next_top_A, 1.0, new_top_A)
    return (
        new_top_A,
        total_A * old_A + next_total_A * new_A,
        sum_AH * old_A[:, None] + next_sum_AH * new_A[:, None],
    )


def fold_splits(
    sum_ZTNH: jax.Array,
    top_ZTN: jax.Array,
    total_ZTN: jax.Array,
    splits_T: jax.Array,
    sinks_N: jax.Array | None,
    dtype: jnp.dtype,
    *,
    interpret: bool,
) -> jax.Array:
    """Returns out_TNH in `dtype` of splits that are segments, which are added up in order.

    A program of attention that goes through all segments has the same bits.

    Args:
        sum_ZTNH: The sums of values of Z splits in float32.
        top_ZTN: The maxima of their scores (to base 2).
        total_ZTN: The sums of their weights.
        splits_T: The number of splits of each token; a token without splits gets zeros.
        sinks_N: The sinks of heads; None for none.
        dtype: The type of the result.
        interpret: Runs the kernel on CPU.
    """
    _, num_tokens, num_heads, width = sum_ZTNH.shape
    call = tb.kernel_call(
        functools.partial(_fold_kernel, num_heads=num_heads, width=width, interpret=interpret),
        name="paged_attention_fold",
        grid=(num_tokens, pl.cdiv(num_heads, HEADS)),
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_heads, width), dtype),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )
    out: jax.Array = call(sum_ZTNH, top_ZTN, total_ZTN, splits_T, sinks_N)
    return out


def _fold_kernel(  # type: ignore[no-untyped-def]
    sum_ref,
    top_ref,
    total_ref,
    splits_ref,
    sinks_ref,
    out_ref,
    *,
    num_heads: int,
    width: int,
    interpret: bool,
) -> None:
    token = pl.program_id(0)
    head_A = pl.program_id(1) * HEADS + jnp.arange(HEADS)
    at_H = jnp.arange(pl.next_power_of_2(width))
    has_A = head_A < num_heads
    mask_AH = has_A[:, None] & (at_H < width)[None, :]
    exp2_of = functools.partial(tb.exp2_of, interpret=interpret)

    def add(split, total):  # type: ignore[no-untyped-def]
        segment = (
            tb.load(top_ref.at[split, token, head_A], mask=has_A, other=LOWEST),
            tb.load(total_ref.at[split, token, head_A], mask=has_A, other=0.0),
            tb.load(
                sum_ref.at[split, token, head_A[:, None], at_H[None, :]], mask=mask_AH, other=0.0
            ),
        )
        return fold(total, segment, exp2_of)

    zeros_AH = jnp.zeros((HEADS, at_H.shape[0]), jnp.float32)
    total = *start(sinks_ref, head_A, has_A), zeros_AH
    _, total_A, sum_AH = lax.fori_loop(0, tb.load(splits_ref.at[token]), add, total)
    out_AH = sum_AH / jnp.where(total_A == 0.0, 1.0, total_A)[:, None]
    at_AH = out_ref.at[token, head_A[:, None], at_H[None, :]]
    tb.store(at_AH, out_AH.astype(out_ref.dtype), mask=mask_AH)
