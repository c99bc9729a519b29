"""These kernels compute in C++ what layers do between two products, row by row.

Each function is one call in place of the operations that XLA makes of it, which convert bfloat16
number by number, on one thread. Numbers are computed in float32 and rounded once at the end.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.cpu import library

# The activations, by their formula; None for none.
ACTIVATIONS = (None, "silu", "gelu_tanh", "gelu")


def takes(dtype: DTypeLike) -> bool:
    """Returns whether there are kernels for rows of this type on this machine."""
    return not library.load().reason and jnp.dtype(dtype).name in ("float32", "bfloat16")


def gate(both_TF: Float[Array, "T F2"], activation: str) -> Float[Array, "T F"]:
    """Returns `activation(gate) * up`, where each row has the gates and then the ups."""
    num_rows, width = both_TF.shape
    shape = jax.ShapeDtypeStruct((num_rows, width // 2), both_TF.dtype)
    call = jax.ffi.ffi_call("jaxpage_gate", shape, vmap_method="sequential")
    y_TF: jax.Array = call(both_TF, activation=np.int64(ACTIVATIONS.index(activation)))
    return y_TF


def rms_norm(
    x_TD: Float[Array, "T D"], scale_D: Float[Array, "D"], epsilon: float, offset: float
) -> Float[Array, "T D"]:
    """Returns `(scale + offset) * x / sqrt(mean(x^2) + epsilon)`."""
    shape = jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype)
    call = jax.ffi.ffi_call("jaxpage_rms_norm", shape, vmap_method="sequential")
    y_TD: jax.Array = call(x_TD, scale_D, epsilon=np.float32(epsilon), offset=np.float32(offset))
    return y_TD


def add_and_norm(
    x_TD: Float[Array, "T D"],
    added_TD: Float[Array, "T D"],
    scale_D: Float[Array, "D"],
    epsilon: float,
    offset: float,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Returns the rounded sum of both, and `rms_norm` of it."""
    shape = jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype)
    call = jax.ffi.ffi_call("jaxpage_add_and_norm", (shape, shape), vmap_method="sequential")
    numbers = {"epsilon": np.float32(epsilon), "offset": np.float32(offset)}
    sum_TD, y_TD = call(x_TD, added_TD, scale_D, **numbers)
    return sum_TD, y_TD


def layer_norm(
    x_TD: Float[Array, "T D"],
    scale_D: Float[Array, "D"] | None,
    bias_D: Float[Array, "D"] | None,
    epsilon: float,
    offset: float,
    added_TD: Float[Array, "T D"] | None = None,
    *,
    keeps_sum: bool = False,
) -> tuple[Float[Array, "T D"] | None, Float[Array, "T D"]]:
    """Returns the sum of x and what is added, and its norm.

    The norm is `(scale + offset) * (x - mean) / sqrt(variance + epsilon) + bias`.

    Args:
        x_TD: The rows.
        scale_D: The scale; None for a factor of one.
        bias_D: The bias, in the type of the scale; None for none.
        epsilon: The number that is added to the variance.
        offset: The number that is added to the scale.
        added_TD: What is added to the rows first; the sum is rounded to their type. None for
            nothing.
        keeps_sum: True to return the sum; otherwise it is None.
    """
    nothing = jnp.zeros(0, jnp.float32 if scale_D is None else scale_D.dtype)
    shape = jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype)
    of_sum = shape if keeps_sum else jax.ShapeDtypeStruct((0,), x_TD.dtype)
    call = jax.ffi.ffi_call("jaxpage_layer_norm", (of_sum, shape), vmap_method="sequential")
    sum_TD, y_TD = call(
        x_TD,
        jnp.zeros(0, x_TD.dtype) if added_TD is None else added_TD,
        nothing if scale_D is None else scale_D,
        nothing if bias_D is None else bias_D,
        epsilon=np.float32(epsilon),
        offset=np.float32(offset),
    )
    return sum_TD if keeps_sum else None, y_TD


def rotate(
    x_TNH: Float[Array, "T N H"], cos_TE: Float[Array, "T E"], sin_TE: Float[Array, "T E"]
) -> Float[Array, "T N H"]:
    """Turns the pairs (i, E + i) of every head; what is after the pairs stays."""
    shape = jax.ShapeDtypeStruct(x_TNH.shape, x_TNH.dtype)
    call = jax.ffi.ffi_call("jaxpage_rotate", shape, vmap_method="sequential")
    y_TNH: jax.Array = call(x_TNH, cos_TE, sin_TE)
    return y_TNH


def split_and_rotate(
    x_TF: Float[Array, "T F"],
    cos_TE: Float[Array, "T E"],
    sin_TE: Float[Array, "T E"],
    num_keys: int,
    head_dim: int,
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Returns the queries, keys and values that each row has in this order.

    Queries and keys are turned as by `rotate`.
    """
    num_tokens, width = x_TF.shape
    num_queries = width // head_dim - 2 * num_keys
    shapes = [
        jax.ShapeDtypeStruct((num_tokens, heads, head_dim), x_TF.dtype)
        for heads in (num_queries, num_keys, num_keys)
    ]
    call = jax.ffi.ffi_call("jaxpage_split_and_rotate", shapes, vmap_method="sequential")
    q_TNH, k_TKH, v_TKH = call(x_TF, cos_TE, sin_TE)
    return q_TNH, k_TKH, v_TKH
