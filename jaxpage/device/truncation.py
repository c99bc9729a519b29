"""Top-k, top-p and min-p of one row.

Cut-offs are found by bisection over the bits of a float32, which is exact and needs no sort of the vocabulary; on CPU those of a
small top-k among the most likely tokens, which is as exact. On a GPU a kernel finds the same (`selection`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import mass_of

NUM_LIKELIEST = 128  # a top-k up to this is found without bisecting the vocabulary


class Asked(NamedTuple):
    """The cut-offs that any random draw of a step asks for, where all are computed at once: others are not computed."""

    top_k: jax.Array
    top_p: jax.Array
    top_p_or_min_p: jax.Array


def where_wanted(
    wanted: jax.Array,
    asked: Asked | None,
    by_any: str,
    work: Callable[[], jax.Array],
    otherwise: Callable[[], jax.Array],
) -> jax.Array:
    """`work()` of a draw that wants it. A row's own condition becomes a selection, for which both are computed, where all rows are computed
    at once (`asked`): there the condition is whether any draw wants it (the field `by_any`, "" for always), and then each draw selects."""
    if asked is None:
        return jax.lax.cond(wanted, work, otherwise)

    def selected() -> jax.Array:
        return jnp.where(wanted, work(), otherwise())

    return jax.lax.cond(getattr(asked, by_any), selected, otherwise) if by_any else selected()


def truncate(
    logits_V: Float[Array, "V"],
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    by_row: bool,
    asked: Asked | None = None,
) -> Float[Array, "V"]:
    """Sets to -inf what top-k, top-p and min-p leave out, in this order. Ties at a cut-off stay in, as in Hugging Face's top-k.

    top_k: 0 keeps all.
    top_p: keeps the most likely tokens until their mass, among those that top-k kept, reaches top_p.
    min_p: keeps what is at least min_p times as likely as the most likely token.
    by_row: on CPU a small top-k is found in less time than the bisection takes, and top-p is then a matter of a few tokens.
    asked: what the draws ask for that are computed at once with this one.
    """

    def bisected() -> jax.Array:
        cuts = (top_k > 0) & (top_k < logits_V.shape[0])
        cutoff = where_wanted(
            cuts,
            asked,
            "top_k",
            lambda: _largest_cutoff(
                logits_V, lambda above_V: jnp.sum(above_V, dtype=jnp.int32) >= top_k
            ),
            lambda: jnp.float32(-jnp.inf),
        )
        return _cut(logits_V, cutoff, None, top_p, min_p, asked, by_row=by_row)

    def among_the_likeliest() -> jax.Array:
        likeliest_K = jax.lax.top_k(logits_V[None], num_likeliest)[0][0]
        cutoff = likeliest_K[jnp.clip(top_k, 1, num_likeliest) - 1]
        return _cut(logits_V, cutoff, likeliest_K, top_p, min_p, asked, by_row=True)

    if not by_row:
        return bisected()
    num_likeliest = min(NUM_LIKELIEST, logits_V.shape[0])
    return jax.lax.cond((top_k > 0) & (top_k <= num_likeliest), among_the_likeliest, bisected)


def _cut(
    logits_V: jax.Array,
    cutoff: jax.Array,
    likeliest_K: jax.Array | None,
    top_p: jax.Array,
    min_p: jax.Array,
    asked: Asked | None,
    *,
    by_row: bool,
) -> jax.Array:
    """The logits that reach the cut-off, less what top-p and min-p leave out of them."""
    kept_V = where_wanted(
        (top_p < 1.0) | (min_p > 0.0),
        asked,
        "top_p_or_min_p",
        lambda: _likely(logits_V, likeliest_K, cutoff, top_p, min_p, asked, by_row=by_row),
        lambda: logits_V >= cutoff,
    )
    return jnp.where(kept_V, logits_V, -jnp.inf)


def _likely(
    logits_V: jax.Array,
    likeliest_K: jax.Array | None,
    cutoff: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    asked: Asked | None,
    *,
    by_row: bool,
) -> jax.Array:
    """Returns what top-p and min-p leave in of the logits that reach the cut-off.

    by_row: sums are of floats, in the order that XLA has for one row; else they are exact, and a kernel has the same.
    """
    largest = jnp.max(logits_V)
    add_up = jnp.sum if by_row else mass_of

    def relative(logits: jax.Array) -> jax.Array:
        return jnp.where(logits >= cutoff, jnp.exp(logits - largest), 0.0)

    likelihood_V = relative(logits_V)
    mass = top_p * add_up(likelihood_V)

    def bisected() -> jax.Array:
        return likelihood_V >= _largest_cutoff(
            likelihood_V, lambda above_V: add_up(jnp.where(above_V, likelihood_V, 0.0)) >= mass
        )

    def nucleus() -> jax.Array:
        if likeliest_K is None:
            return bisected()
        reached_K = jnp.cumsum(relative(likeliest_K)) >= mass
        return jax.lax.cond(  # ties may reach beyond the likeliest
            jnp.any(reached_K), lambda: logits_V >= likeliest_K[jnp.argmax(reached_K)], bisected
        )

    kept_V = where_wanted(
        top_p < 1.0, asked, "top_p", nucleus, lambda: jnp.ones_like(logits_V, bool)
    )
    kept_V &= (logits_V >= cutoff) & (likelihood_V >= min_p)
    return kept_V | (likelihood_V == 1.0)  # the likeliest stays, whatever the cut-offs


def _largest_cutoff(values_V: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest float32 x such that `enough(values_V >= x)`. `enough` must hold for more and more as x falls."""

    def narrow(bit: jax.Array, prefix: jax.Array) -> jax.Array:
        candidate = prefix | (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        return jnp.where(enough(values_V >= _from_order(candidate)), candidate, prefix)

    return _from_order(jax.lax.fori_loop(0, 32, narrow, jnp.uint32(0)))


def _from_order(order: jax.Array) -> jax.Array:
    """The float32 with this place in the order of all float32: the bits are flipped such that integers compare as floats do.

    The places of NaN, beyond both infinities, become those infinities.
    """
    bits = jnp.where(order >> 31 == 1, order ^ jnp.uint32(0x80000000), ~order)
    value = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isnan(value), jnp.where(order >> 31 == 1, jnp.inf, -jnp.inf), value)
