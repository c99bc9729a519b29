"""Writes a step's new keys and values into their slots; donated pages are written in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.compat import target_device
from pallas_kernels.kernel_set import Call, KernelSet, no_kernel
from pallas_kernels.page_layouts import (
    INTERLEAVED,
    SEPARATE,
    check_interleaved,
    interleaved_width,
)
from pallas_kernels.quantized_pages import check_scales
from pallas_kernels.sets import candidates, first_that_takes


def write_kv(
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"] | None,
    k_pages: Num[Array, "P S K H"],
    v_pages: Num[Array, "P S K H"] | None,
    slots_T: Int[Array, "T"],
    *,
    k_scale: Float[Array, "P S K"] | None = None,
    v_scale: Float[Array, "P S K"] | None = None,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array | None, ...]:
    """Returns the pages with token t's key and value in slot `slots_T[t]` (block * S + offset).

    Float pages take the numbers cast to their type. Pages of int8 or float8 have scales and take
    the numbers quantised, as `quantized_pages` says. Padding tokens name a slot of the null block,
    several of them the same; it then holds the numbers of one of them. No other slot may be named
    twice. A slot outside the pages is not written: the host must see to it that there is none.

    Args:
        k_TKH: The new keys.
        v_TKH: The new values, or None if `paged_attention` finds the values in the keys.
        k_pages: The pages of keys.
        v_pages: The pages of values, or None as above. If it is None and there are values,
            `k_pages` is interleaved: [P, S, 2K, W], the value of each head after its key.
        slots_T: The slot of each token.
        k_scale: The scales of quantised pages of keys.
        v_scale: The scales of quantised pages of values.
        backend: One of `BACKENDS`, or "auto": a kernel where JAX's default backend is a GPU.
        interpret: Runs the kernel on CPU, operation by operation; for `INTERPRETABLE_BACKENDS`.

    Returns:
        The k_pages and v_pages, then k_scale and v_scale if they were given.

    Raises:
        ValueError: An argument does not fit; the message names it and its value.
        TypeError: An argument has the wrong type.
        NotImplementedError: No backend takes the call; the message has every backend's reason.
    """
    written = check(k_TKH, v_TKH, k_pages, v_pages, slots_T, k_scale, v_scale)
    layout = INTERLEAVED if v_TKH is not None and v_pages is None else SEPARATE
    call = Call(interpret=interpret, page_dtype=written[2].dtype.name, layout=layout)
    return first_that_takes(
        "write_kv", lambda each: each.write, *written, call=call, backend=backend
    )


def rotate_and_write(
    x_TMH: Float[Array, "T M H"] | Float[Array, "Z T M H"],
    cos_TE: Float[Array, "T E"],
    sin_TE: Float[Array, "T E"],
    k_pages: Num[Array, "P S K H"],
    v_pages: Num[Array, "P S K H"],
    slots_T: Int[Array, "T"],
    *,
    k_scale: Float[Array, "P S K"] | None = None,
    v_scale: Float[Array, "P S K"] | None = None,
    query_scale_H: Float[Array, "H"] | None = None,
    key_scale_H: Float[Array, "H"] | None = None,
    epsilon: float = 0.0,
    offset: float = 0.0,
    dtype: DTypeLike | None = None,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Splits heads into queries, keys and values, rotates the first two, and writes the others.

    Each token has N = M - 2K heads of queries, K of keys and K of values, in this order. With
    scales, a head x of queries or keys becomes `(scale + offset) * x / sqrt(mean(x^2) + epsilon)`,
    rounded. The pairs (i, E + i) of queries and keys are turned by the token's angles, in float32;
    what is after the pairs stays. Keys and values go to the pages as `write_kv` writes them.

    Args:
        x_TMH: The heads, or the sums of their segments; see `matmul_and_sums`.
        cos_TE: The cosines.
        sin_TE: The sines.
        k_pages: See `write_kv`, also for the other arguments.
        v_pages: The pages of values.
        slots_T: The slot of each token.
        k_scale: The scales of quantised pages of keys.
        v_scale: The scales of quantised pages of values.
        query_scale_H: The scale of the RMS norm of each head of queries; None for no norms.
        key_scale_H: The same of keys; both are given, or none.
        epsilon: The number that norms add to the mean of squares.
        offset: The number that norms add to scales.
        dtype: The type to which sums of segments are rounded; None for that of the heads.
        backend: One of `BACKENDS`, or "auto".
        interpret: Runs the kernel on CPU, operation by operation.

    Returns:
        The queries [T, N, H], and what `write_kv` returns.

    Raises:
        ValueError: An argument does not fit; the message names it and its value.
        TypeError: An argument has the wrong type.
        NotImplementedError: No backend has such a kernel for the call; see `write_kv`.
    """
    num_keys = k_pages.shape[2]
    num_queries = x_TMH.shape[-2] - 2 * num_keys
    if num_queries < 1 or 2 * cos_TE.shape[1] > x_TMH.shape[-1]:
        raise ValueError(
            f"x_TMH {x_TMH.shape} must have more than 2 x {num_keys} heads, at least 2 x "
            f"{cos_TE.shape[1]} wide"
        )
    if (query_scale_H is None) != (key_scale_H is None):
        raise ValueError("query_scale_H and key_scale_H must be given both, or neither")
    for name, scale_H in (("query_scale_H", query_scale_H), ("key_scale_H", key_scale_H)):
        if scale_H is not None and scale_H.shape != x_TMH.shape[-1:]:
            raise ValueError(
                f"{name} {scale_H.shape} must have one number for each of a head's "
                f"{x_TMH.shape[-1]}"
            )
    whole_TMH = x_TMH if x_TMH.ndim == 3 else x_TMH[0]
    k_TKH, v_TKH = jnp.split(whole_TMH[:, num_queries:], 2, axis=1)  # for the checks alone
    _, _, *pages, slots_T, k_scale, v_scale = check(
        k_TKH, v_TKH, k_pages, v_pages, slots_T, k_scale, v_scale
    )
    call = Call(interpret=interpret, page_dtype=k_pages.dtype.name, layout=SEPARATE)
    dtype_name = jnp.dtype(dtype or x_TMH.dtype).name

    def pick(kernels: KernelSet) -> Callable[..., tuple[jax.Array, ...]]:
        return functools.partial(
            kernels.rotate_and_write or no_kernel, dtype=dtype_name, epsilon=epsilon, offset=offset
        )

    q_TNH, *written = first_that_takes(
        "rotate_and_write",
        pick,
        *(x_TMH, cos_TE, sin_TE, *pages, slots_T, k_scale, v_scale, query_scale_H, key_scale_H),
        call=call,
        backend=backend,
    )
    return q_TNH, tuple(written)


def has_rotate_and_write(*, backend: str = "auto", interpret: bool = False) -> bool:
    """Returns whether any set that would be tried has a kernel for `rotate_and_write`."""
    platform = target_device().platform
    return any(each.rotate_and_write for each in candidates(backend, platform, interpret=interpret))


def check(
    k_TKH: Any,
    v_TKH: Any,
    k_pages: Any,
    v_pages: Any,
    slots_T: Any,
    k_scale: Any | None,
    v_scale: Any | None,
) -> tuple[Any, ...]:
    """Returns the arguments as `KernelSet.write` gets them.

    Raises:
        ValueError: An argument does not fit; the message names it.
        TypeError: An argument has the wrong type.
    """
    k_TKH, k_pages, slots_T = map(jnp.asarray, (k_TKH, k_pages, slots_T))
    v_TKH, v_pages, k_scale, v_scale = (
        None if array is None else jnp.asarray(array)
        for array in (v_TKH, v_pages, k_scale, v_scale)
    )
    _check(k_TKH, v_TKH, k_pages, v_pages, slots_T)
    if v_TKH is not None and v_pages is None:
        check_interleaved(k_pages, v_pages, k_scale)
    else:
        check_scales(k_pages, v_pages, k_scale, v_scale)
    return k_TKH, v_TKH, k_pages, v_pages, slots_T.astype(jnp.int32), k_scale, v_scale


def _check(
    k_TKH: jax.Array,
    v_TKH: jax.Array | None,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    slots_T: jax.Array,
) -> None:
    if k_pages.ndim != 4 or not k_pages.size:
        raise ValueError(
            f"k_pages must have 4 axes and not be empty, but its shape is {k_pages.shape}"
        )
    if v_TKH is None and v_pages is not None:
        raise ValueError("v_pages must go with v_TKH, which is None")
    if v_pages is not None and v_pages.shape != k_pages.shape:
        raise ValueError(
            f"k_pages and v_pages must be alike, but are {k_pages.shape} and {v_pages.shape}"
        )
    if slots_T.ndim != 1 or not jnp.issubdtype(slots_T.dtype, jnp.integer):
        raise TypeError(
            f"slots_T must hold integers along one axis, but is {slots_T.dtype} {slots_T.shape}"
        )
    num_kv_heads, width = k_pages.shape[2:]
    if v_TKH is not None and v_pages is None:
        num_kv_heads //= 2
        # Heads are narrower than pages by zeros, which the write adds.
        if interleaved_width(k_TKH.shape[-1]) == width:
            width = k_TKH.shape[-1]
    want = (slots_T.shape[0], num_kv_heads, width)
    for name, new in (("k_TKH", k_TKH), ("v_TKH", v_TKH)):
        if new is None:
            continue
        if new.shape != want:
            raise ValueError(
                f"{name} must have one vector per slot and head of the pages, {want}, but is "
                f"{new.shape}"
            )
        if not jnp.issubdtype(new.dtype, jnp.floating):
            raise TypeError(f"{name} must hold floats, but holds {new.dtype}")
