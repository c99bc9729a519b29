"""Draws a token per row inside the step.

The noise of a draw is a function of (request seed, sample index, position) alone, and a token is the argmax of logits plus Gumbel
noise, so a draw ignores its batch neighbours and whatever happened to the request before. Whatever else needs noise has a stream of its
own (`Stream`). Temperature, top-k, top-p and min-p act
in the order of Hugging Face's processors. Cut-offs are found by bisection over the bits of a float32, which is exact and needs no
sort of the vocabulary; on CPU those of a small top-k among the likeliest tokens, which is as exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpage.device.logits_processors import process_logits
from jaxpage.device.step_inputs import Flags, ProcessorInputs, StepInputs
from jaxpage.shapes import MOST_CANDIDATES, NOT_FINITE, NOTHING_ALLOWED

NUM_CANDIDATES = 64  # W: candidates whose log probabilities leave the device when a row asks for any
NUM_LIKELIEST = 128  # a top-k up to this is found without bisecting the vocabulary


class Draws(NamedTuple):
    """What a request wants of its draws, and what their noise follows from: an entry for each."""

    temperature_R: jax.Array
    top_k_R: jax.Array
    top_p_R: jax.Array
    min_p_R: jax.Array
    seed_R2: jax.Array
    sample_index_R: jax.Array
    position_R: jax.Array  # the place that the drawn token takes


class DrawnFrom(NamedTuple):
    """What drafts were drawn from: probabilities of so many tokens, and 0 of all others."""

    ids_RW: jax.Array
    q_RW: jax.Array


def draws_of(inputs: StepInputs) -> Draws:
    """The step's own."""
    return Draws(
        inputs.temperature_R,
        inputs.top_k_R,
        inputs.top_p_R,
        inputs.min_p_R,
        inputs.seed_R2,
        inputs.sample_index_R,
        inputs.drawn_position_R,
    )


class Asked(NamedTuple):
    """What any random draw of a step asks for, where all are computed at once: what none asks for is not computed."""

    top_k: jax.Array
    top_p: jax.Array
    top_p_or_min_p: jax.Array


class Stream:
    """Noise that is none of a draw's own: folded into the seed before all else, where no sample index reaches."""

    DRAFT = 0xFFFFFFFF  # for draws of drafts
    ACCEPT = 0xFFFFFFFE  # whether a draft is rejected; also by its place among those behind the same token
    RESIDUAL = 0xFFFFFFFD  # what is drawn where all of them were


def noise_key(seed_2: jax.Array, sample_index: jax.Array, position: jax.Array, stream: int | None = None) -> jax.Array:
    key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
    if stream is not None:
        key = jax.random.fold_in(key, stream)
    return jax.random.fold_in(jax.random.fold_in(key, sample_index), position)


def draw(
    logits_BV: Float[Array, "B V"], inputs: StepInputs, processor_inputs: ProcessorInputs, *, by_row: bool
) -> Int[Array, "B"]:
    """One token id per row; NOT_FINITE or NOTHING_ALLOWED where none can be chosen.

    by_row: a loop over rows instead of one wide computation: on CPU greedy rows then cost no noise, and a row's sums have one shape.
    """
    is_finite_B = are_finite(logits_BV)
    logits_BV = process_logits(logits_BV, inputs, processor_inputs, by_row=by_row)

    def random() -> jax.Array:
        return _each_draw(_draw_row, (logits_BV, *draws_of(inputs)), by_row=by_row)

    token_ids_B = jax.lax.cond(
        inputs.flags[Flags.RANDOM] > 0, random, lambda: jax.vmap(_first_of_the_largest)(logits_BV)
    )
    return jnp.where(is_finite_B, token_ids_B, NOT_FINITE)


def are_finite(logits_BV: Float[Array, "B V"]) -> Bool[Array, "B"]:
    """Comparisons, because a wide maximum of XLA:CPU loses a NaN."""
    return jnp.all(logits_BV < jnp.inf, axis=-1) & jnp.any(logits_BV > -jnp.inf, axis=-1)


def each_row(function: Callable[..., Any], rows: tuple[Any, ...], *, by_row: bool) -> Any:
    if by_row:
        return jax.lax.map(lambda row: function(*row), rows)
    return jax.vmap(function)(*rows)


def _each_draw(function: Callable[..., Any], rows: tuple[Any, ...], *, by_row: bool) -> Any:
    """rows: logits, temperature, top-k, top-p, min-p, and more. The function also gets `by_row` and `asked`."""
    logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, *_ = rows
    asked = None
    if not by_row:

        def any_random(wants_R: jax.Array) -> jax.Array:
            return jnp.any((temperature_R > 0.0) & wants_R)

        cuts_R, nucleus_R = (top_k_R > 0) & (top_k_R < logits_RV.shape[1]), top_p_R < 1.0
        asked = Asked(any_random(cuts_R), any_random(nucleus_R), any_random(nucleus_R | (min_p_R > 0.0)))
    return each_row(functools.partial(function, by_row=by_row, asked=asked), rows, by_row=by_row)


def _where_wanted(
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


def perturbed(
    logits_RV: Float[Array, "R V"], draws: Draws, is_random: jax.Array, *, by_row: bool
) -> Float[Array, "R V"]:
    """Of what `draw` takes the largest: cut off and with noise where a draw is random, the logits themselves where it is greedy.

    is_random: whether any is.
    """

    def perturb(logits_V: jax.Array, temperature: jax.Array, *rest: jax.Array, **options: Any) -> jax.Array:
        noisy = functools.partial(_perturb, logits_V, temperature, *rest, **options)
        return _where_wanted(temperature > 0.0, options["asked"], "", noisy, lambda: logits_V)

    return jax.lax.cond(is_random, lambda: _each_draw(perturb, (logits_RV, *draws), by_row=by_row), lambda: logits_RV)


def draw_draft(logits_RV: Float[Array, "R V"], draws: Draws, *, by_row: bool) -> tuple[Int[Array, "R"], DrawnFrom]:
    """Tokens for acceptance by rejection, from noise of their own, and the distributions that they were really drawn from: the likeliest
    `MOST_CANDIDATES` tokens of what `draw` draws from. Of a greedy row the likeliest alone."""

    def draw_row(logits_V: jax.Array, temperature: jax.Array, *rest: jax.Array, **options: Any) -> Any:
        *cutoffs, seed_2, sample_index, position = rest
        log_q_V = _distribution(logits_V, temperature, *cutoffs, **options)
        log_q_W, ids_W = jax.lax.top_k(log_q_V[None], min(MOST_CANDIDATES, log_q_V.shape[0]))
        key = noise_key(seed_2, sample_index, position, Stream.DRAFT)
        place = jnp.maximum(with_noise(log_q_W[0], key), 0)
        lacking = (0, MOST_CANDIDATES - ids_W.shape[1])
        padded_W = jnp.pad(ids_W[0].astype(jnp.int32), lacking, constant_values=-1)
        return ids_W[0, place], DrawnFrom(padded_W, jnp.pad(jax.nn.softmax(log_q_W[0]), lacking))

    drawn: tuple[jax.Array, DrawnFrom] = _each_draw(draw_row, (logits_RV, *draws), by_row=by_row)
    return drawn


def _draw_row(logits_V: jax.Array, temperature: jax.Array, *rest: jax.Array, **options: Any) -> jax.Array:
    return _where_wanted(
        temperature > 0.0,
        options["asked"],
        "",
        lambda: _first_of_the_largest(_perturb(logits_V, temperature, *rest, **options)),
        lambda: _first_of_the_largest(logits_V),
    )


def _perturb(
    logits_V: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seed_2: jax.Array,
    sample_index: jax.Array,
    position: jax.Array,
    **options: Any,
) -> jax.Array:
    scaled_V = truncate(logits_V / temperature, top_k, top_p, min_p, **options)
    return scaled_V + jax.random.gumbel(noise_key(seed_2, sample_index, position), logits_V.shape, jnp.float32)


def with_noise(logits_V: Float[Array, "V"], key: jax.Array) -> Int[Array, ""]:
    """A token drawn from these logits; NOTHING_ALLOWED if there is none."""
    return _first_of_the_largest(logits_V + jax.random.gumbel(key, logits_V.shape, jnp.float32))


def distributions(
    logits_BV: Float[Array, "B V"], inputs: StepInputs, processor_inputs: ProcessorInputs, *, by_row: bool
) -> Float[Array, "B V"]:
    """Log probabilities of what `draw` draws: of a greedy row 0 for its token. All -inf where no token can be chosen."""
    is_finite_B = are_finite(logits_BV)
    logits_BV = process_logits(logits_BV, inputs, processor_inputs, by_row=by_row)
    rows = (logits_BV, inputs.temperature_R, inputs.top_k_R, inputs.top_p_R, inputs.min_p_R)
    log_p_BV = _each_draw(_distribution, rows, by_row=by_row)
    return jnp.where(is_finite_B[:, None], log_p_BV, -jnp.inf)


def _distribution(
    logits_V: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    **options: Any,
) -> jax.Array:
    def random() -> jax.Array:
        return truncate(logits_V / temperature, top_k, top_p, min_p, **options)

    def greedy() -> jax.Array:
        return jnp.where(jnp.arange(logits_V.shape[0]) == _first_of_the_largest(logits_V), 0.0, -jnp.inf)

    chosen_V = _where_wanted(temperature > 0.0, options["asked"], "", random, greedy)
    return jnp.where(jnp.isfinite(jnp.max(chosen_V)), jax.nn.log_softmax(chosen_V), -jnp.inf)


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

    top_k: 0 keeps all. top_p: keeps the likeliest tokens until their mass, among those that top-k kept, reaches top_p.
    min_p: keeps what is at least min_p times as likely as the likeliest.
    by_row: on CPU a small top-k is found in less time than the bisection takes, and top-p is then a matter of a few tokens.
    asked: of all draws that are computed at once with this one.
    """

    def bisected() -> jax.Array:
        cuts = (top_k > 0) & (top_k < logits_V.shape[0])
        cutoff = _where_wanted(
            cuts,
            asked,
            "top_k",
            lambda: _largest_cutoff(logits_V, lambda above_V: jnp.sum(above_V, dtype=jnp.int32) >= top_k),
            lambda: jnp.float32(-jnp.inf),
        )
        return _cut(logits_V, cutoff, None, top_p, min_p, asked)

    def among_the_likeliest() -> jax.Array:
        likeliest_K = jax.lax.top_k(logits_V[None], num_likeliest)[0][0]
        return _cut(logits_V, likeliest_K[jnp.clip(top_k, 1, num_likeliest) - 1], likeliest_K, top_p, min_p, asked)

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
) -> jax.Array:
    """The logits that reach the cut-off, less what top-p and min-p leave out of them."""
    kept_V = _where_wanted(
        (top_p < 1.0) | (min_p > 0.0),
        asked,
        "top_p_or_min_p",
        lambda: _likely(logits_V, likeliest_K, cutoff, top_p, min_p, asked),
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
) -> jax.Array:
    """What top-p and min-p leave in of the logits that reach the cut-off."""
    largest = jnp.max(logits_V)

    def relative(logits: jax.Array) -> jax.Array:
        return jnp.where(logits >= cutoff, jnp.exp(logits - largest), 0.0)

    likelihood_V = relative(logits_V)
    mass = top_p * jnp.sum(likelihood_V)

    def bisected() -> jax.Array:
        return likelihood_V >= _largest_cutoff(
            likelihood_V, lambda above_V: jnp.sum(jnp.where(above_V, likelihood_V, 0.0)) >= mass
        )

    def nucleus() -> jax.Array:
        if likeliest_K is None:
            return bisected()
        reached_K = jnp.cumsum(relative(likeliest_K)) >= mass
        return jax.lax.cond(  # ties may reach beyond the likeliest
            jnp.any(reached_K), lambda: logits_V >= likeliest_K[jnp.argmax(reached_K)], bisected
        )

    kept_V = _where_wanted(top_p < 1.0, asked, "top_p", nucleus, lambda: jnp.ones_like(logits_V, bool))
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


def largest_of(logits_V: Float[Array, "V"]) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """The largest and the first place that has it, as two plain reductions, which XLA vectorises on CPU."""
    largest = jnp.max(logits_V)
    index_V = jnp.arange(logits_V.shape[0], dtype=jnp.int32)
    return largest, jnp.min(jnp.where(logits_V == largest, index_V, logits_V.shape[0]))


def _first_of_the_largest(logits_V: jax.Array) -> jax.Array:
    """NOTHING_ALLOWED if there is none."""
    largest, first = largest_of(logits_V)
    return jnp.where(jnp.isfinite(largest), first, NOTHING_ALLOWED)


LogProbabilities = tuple[Float[Array, "B"], Int[Array, "B"], Int[Array, "B W"], Float[Array, "B W"]]


def log_probabilities(
    logits_BV: Float[Array, "B V"], token_ids_B: Int[Array, "B"], *, by_row: bool
) -> LogProbabilities:
    """The chosen token's log probability and rank, and the W likeliest tokens with theirs, of the model's own distribution."""
    if by_row:
        alone = (logits_BV[:, None], token_ids_B[:, None])
        rows: LogProbabilities = jax.lax.map(lambda row: _log_probabilities(*row), alone)
        return jax.tree.map(lambda array: array[:, 0], rows)
    return _log_probabilities(logits_BV, token_ids_B)


def _log_probabilities(logits_BV: jax.Array, token_ids_B: jax.Array) -> LogProbabilities:
    normalised_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    chosen_B1 = jnp.take_along_axis(normalised_BV, jnp.maximum(token_ids_B, 0)[:, None], axis=-1)
    ranks_B = 1 + jnp.sum(normalised_BV > chosen_B1, axis=-1, dtype=jnp.int32)
    top_BW, ids_BW = jax.lax.top_k(normalised_BV, min(NUM_CANDIDATES, logits_BV.shape[1]))
    return chosen_B1[:, 0], ranks_B, ids_BW.astype(jnp.int32), top_BW
