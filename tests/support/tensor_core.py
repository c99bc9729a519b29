"""A matrix product with the order of sums of a tensor core, for interpreted kernels: 16 inputs at a
time.

Its structure is that of the published bit-accurate model of Hopper's mma.sync and wgmma for
bfloat16 (MMA-Sim, arXiv 2511.10909): the 16 products and the sum before them are cut to one
exponent and added as integers, so that their order does not matter; groups of 16 follow one
another. FRACTION is 25 there, and 22 here, so that int32 holds the sum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

FRACTION = 22


def _exponent(x: jax.Array) -> jax.Array:
    return ((jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) & 255) - 127


def _power(exponent: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type((jnp.clip(exponent, -126, 127) + 127) << 23, jnp.float32)


def _step(a_MK: jax.Array, b_KN: jax.Array, sum_MN: jax.Array) -> jax.Array:
    a_MK1 = a_MK.astype(jnp.float32)[:, :, None]
    b_1KN = b_KN.astype(jnp.float32)[None]
    of_matmuls = jnp.max(_exponent(a_MK1) + _exponent(b_1KN), axis=1)
    top_MN = jnp.clip(jnp.maximum(of_matmuls, _exponent(sum_MN)), -100, 100)
    up_MN = _power(FRACTION - top_MN)
    terms_MKN = jnp.trunc(a_MK1 * b_1KN * up_MN[:, None]).astype(jnp.int32)
    sum_MN = jnp.trunc(sum_MN * up_MN).astype(jnp.int32)
    return (terms_MKN.sum(axis=1) + sum_MN).astype(jnp.float32) * _power(top_MN - FRACTION)


def dot(
    a: jax.Array, b: jax.Array, trans_a: bool = False, trans_b: bool = False, **_: object
) -> jax.Array:
    """Takes the place of `pallas_kernels.triton.backend.dot`."""
    a_MK, b_KN = (a.T if trans_a else a), (b.T if trans_b else b)
    a_JMK = a_MK.reshape(len(a_MK), -1, 16).swapaxes(0, 1)
    b_JKN = b_KN.reshape(-1, 16, b_KN.shape[1])
    empty = jnp.zeros((a_MK.shape[0], b_KN.shape[1]), jnp.float32)
    return jax.lax.scan(lambda total, ab: (_step(*ab, total), None), empty, (a_JMK, b_JKN))[0]
