"""Keeps keys and values in eight bits.

Each slot and key/value head has one float32 scale, so that a slot's content depends only on its own
vector. The pages' type says how a vector x is kept; its scale is max |x| / largest:

    int8:          round(x / scale), ties to even; largest is 127.
                   |x - read| <= scale / 2.
    float8_e4m3fn: x / scale in that type; largest is 448.
                   |x - read| <= max(|x| / 16, scale / 1024).
    uint8:         the same as its bits. Pools are kept like this, because XLA on CPU turns a whole
                   float8 array into float16 to move a part of it.

A vector that contains NaN or infinity has a scale that is not finite. All of it is read as NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

_LARGEST = {jnp.dtype("int8"): 127.0, jnp.dtype("float8_e4m3fn"): 448.0, jnp.dtype("uint8"): 448.0}
# The scale of a vector of zeros. It is far from the subnormal numbers, which XLA flushes to zero.
MIN_SCALE = 2.0**-100


def is_quantized(dtype: DTypeLike) -> bool:
    """Returns whether pages of this type have scales."""
    return jnp.dtype(dtype) in _LARGEST


def spell_dtype(dtype: DTypeLike) -> str:
    """Returns a type of pages as messages and settings name it: "fp8" for its bits, too."""
    name = jnp.dtype(dtype).name
    return "fp8" if name in ("float8_e4m3fn", "uint8") else name


def largest(dtype: DTypeLike) -> float:
    """Returns the greatest magnitude that pages of this type keep, in units of the scale."""
    return _LARGEST[jnp.dtype(dtype)]


def quantize(
    x: Float[Array, "*vectors H"], dtype: DTypeLike
) -> tuple[Num[Array, "*vectors H"], Float[Array, "*vectors"]]:
    """Returns vectors as pages of `dtype` keep them, and their scales."""
    x = x.astype(jnp.float32)
    # Use a product and not a quotient: XLA may turn a division by a constant into a product, and
    # the bits should not depend on that.
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1) * np.float32(1.0 / largest(dtype)), MIN_SCALE)
    scaled = x / scale[..., None]
    if jnp.dtype(dtype) == jnp.int8:
        return jnp.round(scaled).astype(jnp.int8), scale
    codes = scaled.astype(jnp.float8_e4m3fn)
    return jax.lax.bitcast_convert_type(codes, dtype), scale


def dequantize(
    codes: Num[Array, "*vectors H"], scale: Float[Array, "*vectors"] | None
) -> Float[Array, "*vectors H"]:
    """Returns the vectors in float32; pages without scales hold them as they are."""
    if scale is None:
        return codes.astype(jnp.float32)
    if codes.dtype == jnp.uint8:
        codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return codes.astype(jnp.float32) * scale[..., None]


def check_scales(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> None:
    """Checks that scales and pages fit together.

    Raises:
        TypeError: A type does not fit; the message names the argument.
        ValueError: A scale is missing, is too many, or has a wrong shape.
    """
    if v_pages is not None and k_pages.dtype != v_pages.dtype:
        raise TypeError(
            f"k_pages and v_pages must have one type, but hold {k_pages.dtype} and {v_pages.dtype}"
        )
    dtype = k_pages.dtype
    quantized = is_quantized(dtype)
    if not quantized and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"k_pages and v_pages must hold floats, or {_names()} with scales, but hold {dtype}"
        )
    for name, pages, scale in (("k", k_pages, k_scale), ("v", v_pages, v_scale)):
        if pages is None:
            if scale is not None:
                raise ValueError(f"{name}_scale goes with {name}_pages, and there are none")
            continue
        if scale is None:
            if quantized:
                raise ValueError(
                    f"{name}_pages hold {dtype}, which means nothing without {name}_scale"
                )
            continue
        if not quantized:
            raise ValueError(
                f"{name}_scale goes with pages of {_names()}, but {name}_pages hold {dtype}"
            )
        if scale.shape != pages.shape[:3]:
            raise ValueError(
                f"{name}_scale must have one entry per slot and head, {pages.shape[:3]}, but its "
                f"shape is {scale.shape}"
            )
        if scale.dtype != jnp.float32:
            raise TypeError(f"{name}_scale must hold float32, but holds {scale.dtype}")


def _names() -> str:
    return ", ".join(dtype.name for dtype in _LARGEST)
