"""Keys and values in eight bits. One float32 scale per slot and key/value head, so that what a slot holds depends on its own vector alone.

The pages' type says how a vector x is kept, its scale being max |x| / largest:

    int8: round(x / scale), ties to even; largest 127. |x - read| <= scale / 2.
    float8_e4m3fn: x / scale in that type; largest 448. |x - read| <= max(|x| / 16, scale / 1024).
    uint8: the same as its bits. Pools are kept so: to move a part of a float8 array, XLA on CPU turns all of it into float16.

A vector with NaN or infinity in it has a scale that is no finite number, and is read as NaN from end to end.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

_LARGEST = {jnp.dtype("int8"): 127.0, jnp.dtype("float8_e4m3fn"): 448.0, jnp.dtype("uint8"): 448.0}
# far from the subnormal numbers, which XLA flushes to zero; a vector of zeros has it
SMALLEST_SCALE = 2.0**-100


def is_quantized(dtype: DTypeLike) -> bool:
    """Returns whether pages of this type have scales."""
    return jnp.dtype(dtype) in _LARGEST


def largest(dtype: DTypeLike) -> float:
    """Returns the greatest magnitude that quantised pages of this type keep, in units of the scale."""
    return _LARGEST[jnp.dtype(dtype)]


def quantize(
    x: Float[Array, "*vectors H"], dtype: DTypeLike
) -> tuple[Num[Array, "*vectors H"], Float[Array, "*vectors"]]:
    """Vectors as pages of `dtype` keep them, and their scales."""
    x = x.astype(jnp.float32)
    # A product and no quotient, since XLA may make a product of a division by a constant, and the
    # bits should not depend on it.
    scale = jnp.maximum(
        jnp.max(jnp.abs(x), axis=-1) * np.float32(1.0 / largest(dtype)), SMALLEST_SCALE
    )
    scaled = x / scale[..., None]
    if jnp.dtype(dtype) == jnp.int8:
        return jnp.round(scaled).astype(jnp.int8), scale
    kept = scaled.astype(jnp.float8_e4m3fn)
    return jax.lax.bitcast_convert_type(kept, dtype), scale


def dequantize(
    kept: Num[Array, "*vectors H"], scale: Float[Array, "*vectors"] | None
) -> Float[Array, "*vectors H"]:
    """The vectors in float32. Pages without scales hold them as they are."""
    if scale is None:
        return kept.astype(jnp.float32)
    if kept.dtype == jnp.uint8:
        kept = jax.lax.bitcast_convert_type(kept, jnp.float8_e4m3fn)
    return kept.astype(jnp.float32) * scale[..., None]


def check_scales(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> None:
    """Raises TypeError or ValueError, naming the argument, where scales and pages do not fit together."""
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
                f"{name}_scale must have one entry per slot and head, {pages.shape[:3]}, but its shape is {scale.shape}"
            )
        if scale.dtype != jnp.float32:
            raise TypeError(f"{name}_scale must hold float32, but holds {scale.dtype}")


def _names() -> str:
    return ", ".join(dtype.name for dtype in _LARGEST)
