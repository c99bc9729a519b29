"""Cuts off the logits of one row by top-k, top-p and min-p.

Cut-offs are found by bisection over the bits of a float32, which is exact and needs no sort of the
vocabulary. On CPU those of a small top-k are found among the most likely tokens, which is as exact.
On a GPU a kernel finds the same cut-offs (`selection_kernels`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.selection import mass_of

NUM_TOP = 128  # a top-k up to this is found without bisecting the vocabulary


class RequestedTruncation(NamedTuple):
    """Says which cut-offs any random draw of a step asks for, where all draws are computed at once.

    Other cut-offs are not computed.
    """

    top_k: jax.Array
    top_p: jax.Array
    top_p_or_min_p: jax.Array


def where_requested(
    cuts_B: jax.Array,
    requested: RequestedTruncation | None,
    by_any: str,
    work: Callable[[], jax.Array],
    otherwise: Callable[[], jax.Array],
) -> jax.Array:
    """Returns `work()` for a draw that wants it, and `otherwise()` for another one.

    Where rows are computed at once (with `requested`) both are computed, and each draw selects one
    of them. This happens only if any draw wants `work()`: `by_any` is the field of `requested` that
    says so, or "" if it always happens.
    """
    if requested is None:
        return jax.lax.cond(cuts_B, work, otherwise)

    def select() -> jax.Array:
        return jnp.where(cuts_B, work(), otherwise())

    return jax.lax.cond(getattr(requested, by_any), select, otherwise) if by_any else select()


@functools.partial(jax.jit, static_argnames="by_row")
def truncate(
    logits_V: Float[Array, "V"],
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    by_row: bool,
    requested: RequestedTruncation | None = None,
) -> Float[Array, "V"]:
    """Sets to -inf the logits that top-k, top-p and min-p leave out, in this order.

    Ties at a cut-off stay in, as in Hugging Face's top-k.

    Args:
        logits_V: The logits divided by the temperature.
        top_k: The number of tokens to keep; 0 keeps all.
        top_p: Keeps the most likely tokens until their mass, among those that top-k kept, reaches
            this.
        min_p: Keeps tokens that are at least this many times as likely as the most likely one.
        by_row: Computes one row at a time. On CPU a small top-k is then found in less time than the
            bisection takes, and top-p is a matter of a few tokens.
        requested: The cut-offs that draws ask for which are computed at once with this one.
    """

    def bisect() -> jax.Array:
        cuts = (top_k > 0) & (top_k < logits_V.shape[0])
        cutoff = where_requested(
            cuts,
            requested,
            "top_k",
            lambda: _largest_cutoff(
                logits_V, lambda above_V: jnp.sum(above_V, dtype=jnp.int32) >= top_k
            ),
            lambda: jnp.float32(-jnp.inf),
        )
        return _cut(logits_V, cutoff, None, top_p, min_p, requested, by_row=by_row)

    def among_the_top() -> jax.Array:
        top_K = jax.lax.top_k(logits_V[None], num_top)[0][0]
        cutoff = top_K[jnp.clip(top_k, 1, num_top) - 1]
        return _cut(logits_V, cutoff, top_K, top_p, min_p, requested, by_row=True)

    if not by_row:
        return bisect()
    num_top = min(NUM_TOP, logits_V.shape[0])
    return jax.lax.cond((top_k > 0) & (top_k <= num_top), among_the_top, bisect)


def _cut(
    logits_V: jax.Array,
    cutoff: jax.Array,
    top_K: jax.Array | None,
    top_p: jax.Array,
    min_p: jax.Array,
    requested: RequestedTruncation | None,
    *,
    by_row: bool,
) -> jax.Array:
    """Returns the logits that the cut-off, top-p and min-p keep, and -inf for the others."""
    is_kept_V = where_requested(
        (top_p < 1.0) | (min_p > 0.0),
        requested,
        "top_p_or_min_p",
        lambda: _likely(logits_V, top_K, cutoff, top_p, min_p, requested, by_row=by_row),
        lambda: logits_V >= cutoff,
    )
    return jnp.where(is_kept_V, logits_V, -jnp.inf)


def _likely(
    logits_V: jax.Array,
    top_K: jax.Array | None,
    cutoff: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    requested: RequestedTruncation | None,
    *,
    by_row: bool,
) -> jax.Array:
    """Returns which logits reach the cut-off and are kept by top-p and min-p.

    With `by_row` sums are of floats, in the order that XLA has for one row. Otherwise they are
    exact, and a kernel has the same.
    """
    largest = jnp.max(logits_V)
    add_up = jnp.sum if by_row else mass_of

    def relative(logits: jax.Array) -> jax.Array:
        return jnp.where(logits >= cutoff, jnp.exp(logits - largest), 0.0)

    likelihood_V = relative(logits_V)
    mass = top_p * add_up(likelihood_V)

    def bisect() -> jax.Array:
        return likelihood_V >= _largest_cutoff(
            likelihood_V, lambda above_V: add_up(jnp.where(above_V, likelihood_V, 0.0)) >= mass
        )

    def nucleus() -> jax.Array:
        if top_K is None:
            return bisect()
        reached_K = jnp.cumsum(relative(top_K)) >= mass
        return jax.lax.cond(  # ties may reach beyond the most likely tokens
            jnp.any(reached_K), lambda: logits_V >= top_K[jnp.argmax(reached_K)], bisect
        )

    is_kept_V = where_requested(
        top_p < 1.0, requested, "top_p", nucleus, lambda: jnp.ones_like(logits_V, bool)
    )
    is_kept_V &= (logits_V >= cutoff) & (likelihood_V >= min_p)
    return is_kept_V | (likelihood_V == 1.0)  # the most likely token always stays


def _largest_cutoff(values_V: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns the largest float32 x for which `enough(values_V >= x)` holds.

    Where it holds for some x it must hold for every smaller one.
    """

    def narrow(bit: jax.Array, prefix: jax.Array) -> jax.Array:
        candidate = prefix | (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        return jnp.where(enough(values_V >= _from_order(candidate)), candidate, prefix)

    return _from_order(jax.lax.fori_loop(0, 32, narrow, jnp.uint32(0)))


def _from_order(order: jax.Array) -> jax.Array:
    """Returns the float32 with this place in the order of all float32.

    The bits are flipped so that integers compare as floats do. The places of NaN, beyond both
    infinities, become those infinities.
    """
    bits = jnp.where(order >> 31 == 1, order ^ jnp.uint32(0x80000000), ~order)
    value = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isnan(value), jnp.where(order >> 31 == 1, jnp.inf, -jnp.inf), value)
