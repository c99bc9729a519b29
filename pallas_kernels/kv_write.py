"""Writes a step's new keys and values into their slots; donated pages are written in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.kernel_set import Call
from pallas_kernels.page_layouts import (
    INTERLEAVED,
    SEPARATE,
    check_interleaved,
    interleaved_width,
)
from pallas_kernels.quantized_pages import check_scales
from pallas_kernels.sets import first_that_takes


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
