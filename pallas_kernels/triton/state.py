"""Computes the recurrences of layers with states, with Triton kernels whose sums have one order.

The state of a head is a matrix [K, V]. A program takes some of its columns, with all keys, whose
sums its warps add up; what it takes and how many warps it has depend on the widths alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.triton import backend as tb

NUMBERS = 4096  # of a state, that a program keeps in registers
COLS = 64  # the most columns of a program
CHANNELS = 1024  # of a program that convolves
WARPS = 4


def update_state(
    state_BNKV: Float[Array, "B N K V"],
    decay: Float[Array, "B N _ _"],
    k_BNK: Float[Array, "B N K"],
    v_BNV: Float[Array, "B N V"],
    q_BNK: Float[Array, "B N K"],
    beta_BN: Float[Array, "B N"] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B N K V"], Float[Array, "B N V"]]:
    """Returns `S + k (beta * (v - S^T k))^T` of the decayed states S, and its product with q.

    Without `beta` it is `S + k v^T`. All arrays are float32.

    Args:
        state_BNKV: The states.
        decay: The factors of the states, with one number for an axis along which they are equal.
        k_BNK: The keys.
        v_BNV: The values.
        q_BNK: The queries.
        beta_BN: The shares to which values are replaced; None where values are added.
        interpret: Runs the kernel on CPU.
    """
    num_rows, num_heads, num_keys, num_values = state_BNKV.shape
    keys = pl.next_power_of_2(num_keys)
    cols = min(COLS, pl.next_power_of_2(num_values), max(1, NUMBERS // keys))
    shapes = [
        jax.ShapeDtypeStruct(state_BNKV.shape, jnp.float32),
        jax.ShapeDtypeStruct(v_BNV.shape, jnp.float32),
    ]
    call = tb.kernel_call(
        functools.partial(_update, keys=keys, cols=cols),
        name="update_state",
        grid=(num_rows, num_heads, pl.cdiv(num_values, cols)),
        out_shape=shapes,
        num_warps=WARPS,
        num_stages=1,
        interpret=interpret,
    )
    new_BNKV, out_BNV = call(state_BNKV, decay, k_BNK, v_BNV, q_BNK, beta_BN)
    return new_BNKV, out_BNV


def _update(
    state_ref: Any,
    decay_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_ref: Any,
    beta_ref: Any,
    new_ref: Any,
    out_ref: Any,
    *,
    keys: int,
    cols: int,
) -> None:
    row, head = pl.program_id(0), pl.program_id(1)
    num_keys, num_values = state_ref.shape[2:]
    at_K = jnp.arange(keys)
    at_V = pl.program_id(2) * cols + jnp.arange(cols)
    has_K, has_V = at_K < num_keys, at_V < num_values
    mask_KV = has_K[:, None] & has_V[None, :]
    at_KV = (row, head, at_K[:, None], at_V[None, :])
    k_K, q_K = (tb.load(ref.at[row, head, at_K], mask=has_K, other=0.0) for ref in (k_ref, q_ref))
    v_V = tb.load(v_ref.at[row, head, at_V], mask=has_V, other=0.0)
    state_KV = tb.load(state_ref.at[at_KV], mask=mask_KV, other=0.0)
    state_KV = state_KV * _decay(decay_ref, (row, head), (at_K, at_V), mask_KV)
    if beta_ref is not None:
        returned_V = jnp.sum(state_KV * k_K[:, None], axis=0)
        v_V = (v_V - returned_V) * tb.load(beta_ref.at[row, head])
    state_KV = state_KV + k_K[:, None] * v_V[None, :]
    tb.store(new_ref.at[at_KV], state_KV, mask=mask_KV)
    out_V = jnp.sum(state_KV * q_K[:, None], axis=0)
    tb.store(out_ref.at[row, head, at_V], out_V, mask=has_V)


def _decay(ref: Any, place: tuple[Any, Any], at: tuple[Any, Any], mask_KV: Any) -> Any:
    """Returns the factors of a tile of the state, or what has its shape but for equal ones."""
    at_K, at_V = at
    num_keys, num_values = ref.shape[2:]
    if num_keys == num_values == 1:
        return tb.load(ref.at[(*place, np.int32(0), np.int32(0))])
    if num_values == 1:
        return tb.load(ref.at[(*place, at_K, np.int32(0))], mask=at_K < num_keys, other=0.0)[
            :, None
        ]
    if num_keys == 1:
        return tb.load(ref.at[(*place, np.int32(0), at_V)], mask=at_V < num_values, other=0.0)
    return tb.load(ref.at[(*place, at_K[:, None], at_V[None, :])], mask=mask_KV, other=0.0)


def convolve(
    inputs_BWC: Float[Array, "B W C"],
    kernel_WC: Float[Array, "W C"],
    bias_C: Float[Array, "C"] | None,
    *,
    interpret: bool = False,
) -> Float[Array, "B C"]:
    """Returns the sum over places of input times kernel, added up in their order, and the bias."""
    num_rows, num_places, width = inputs_BWC.shape
    cols = min(CHANNELS, pl.next_power_of_2(width))
    call = tb.kernel_call(
        functools.partial(_convolve, num_places=num_places, cols=cols),
        name="convolve",
        grid=(num_rows, pl.cdiv(width, cols)),
        out_shape=jax.ShapeDtypeStruct((num_rows, width), jnp.float32),
        num_warps=WARPS,
        num_stages=1,
        interpret=interpret,
    )
    mixed_BC: jax.Array = call(inputs_BWC, kernel_WC, bias_C)
    return mixed_BC


def _convolve(
    inputs_ref: Any, kernel_ref: Any, bias_ref: Any, out_ref: Any, *, num_places: int, cols: int
) -> None:
    row = pl.program_id(0)
    at_C = pl.program_id(1) * cols + jnp.arange(cols)
    has_C = at_C < out_ref.shape[1]
    total_C = jnp.zeros(cols, jnp.float32)
    for index in range(num_places):
        input_C = tb.load(inputs_ref.at[row, index, at_C], mask=has_C, other=0.0)
        total_C += input_C * tb.load(kernel_ref.at[index, at_C], mask=has_C, other=0.0)
    if bias_ref is not None:
        total_C += tb.load(bias_ref.at[at_C], mask=has_C, other=0.0)
    tb.store(out_ref.at[row, at_C], total_C, mask=has_C)
