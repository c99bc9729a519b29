"""Defines selection in rows of logits.

Top-k, top-p and min-p cut a row off at a logit; another selection finds the largest numbers of a
row. Top-p compares sums of likelihoods, and the order of a sum of floats differs from compiler to
compiler. Here a likelihood is an integer of 44 bits, so its sums are exact in any order, and a
kernel and plain XLA agree about every token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

HALF = 22  # bits of each half of a weight: in units of 2^-22, and of 2^-44
DIGIT = 11  # bits of a digit, which is summed in 32 bits
MAX_VOCABULARY = 2**20 - 1  # the sums of so many digits fit in 32 bits


def weights(likelihood: Float[Array, "..."]) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """Returns the two halves of numbers from 0 to 1 as integers of 44 bits, rounded down.

    1.mantissa * 2^(exponent - 127)   =   high * 2^-22   +   low * 2^-44
    """
    bits = jax.lax.bitcast_convert_type(likelihood, jnp.int32)
    mantissa = (bits & 0x7FFFFF) | 0x800000
    shift = jnp.maximum(128 - (bits >> 23), 1)
    # In a kernel a shift by 32 bits or more has no defined result.
    high = mantissa >> jnp.minimum(shift, 31)
    left = jnp.maximum(HALF - shift, 0)
    right = jnp.minimum(jnp.maximum(shift - HALF, 0), 31)
    low = ((mantissa << left) >> right) & ((1 << HALF) - 1)
    return high, low


def digits(high: Int[Array, "..."], low: Int[Array, "..."]) -> tuple[Int[Array, "..."], ...]:
    """Returns the digits of weights, or of their sums, which `mass` takes; the lowest first."""
    mask = (1 << DIGIT) - 1
    return low & mask, low >> DIGIT, high & mask, high >> DIGIT


def mass(sums: tuple[Int[Array, ""], ...]) -> Float[Array, ""]:
    """Returns the sum of weights, in units of 2^-44, from the sums of their digits.

    Equal sums give equal floats.
    """
    mask = (1 << DIGIT) - 1
    ones, second, third, fourth = sums
    second += ones >> DIGIT
    third += second >> DIGIT
    fourth += third >> DIGIT
    lowest = (second & mask) << DIGIT | ones & mask
    middle = (fourth & 31) << DIGIT | third & mask
    # The products are exact, so that it does not matter whether a compiler rounds between product
    # and sum.
    upper = (fourth >> 5).astype(jnp.float32) * 2.0**16 + middle.astype(jnp.float32)
    return upper * 2.0**HALF + lowest.astype(jnp.float32)


def mass_of(likelihood_V: Float[Array, "V"]) -> Float[Array, ""]:
    """Returns the sum of likelihoods from 0 to 1, in units of 2^-44, by plain XLA.

    Raises:
        ValueError: There are more than `MAX_VOCABULARY` of them.
    """
    check_vocabulary(likelihood_V.shape[0])
    return mass(tuple(jnp.sum(digit_V) for digit_V in digits(*weights(likelihood_V))))


def check_vocabulary(size: int) -> None:
    """Raises ValueError for a vocabulary whose likelihoods cannot be added exactly."""
    if size > MAX_VOCABULARY:
        raise ValueError(
            f"a vocabulary of {size} tokens: top-p adds up at most {MAX_VOCABULARY} likelihoods "
            "exactly"
        )


def value_of(key: Int[Array, "..."]) -> Float[Array, "..."]:
    """Returns the float32 with this place in the order of all float32; zero has place 0."""
    return jax.lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)


def key_of(value: Float[Array, "..."]) -> Int[Array, "..."]:
    """Returns the place of a float32 in the order of all float32: the inverse of `value_of`."""
    bits = jax.lax.bitcast_convert_type(value, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
