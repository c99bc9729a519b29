"""Draws a token for each row inside the step.

The noise of a draw is a function of (request seed, sample index, position) alone, and a token is
the argmax of logits plus Gumbel noise. So a draw depends neither on the other rows of its batch nor
on what happened to the request before. Everything else that needs noise has a stream of its own
(`Stream`). Temperature, top-k, top-p and min-p act in the order of Hugging Face's processors
(`truncation`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpage.device.inputs.step_inputs import Flags, ProcessorInputs, StepInputs
from jaxpage.device.logits_processors import (
    are_processed,
    penalties_of,
    process_logits,
    process_rows,
)
from jaxpage.device.selection_kernels import kernels_in_use
from jaxpage.device.truncation import RequestedTruncation, truncate, where_requested
from jaxpage.shapes import MAX_CANDIDATES, NOT_FINITE, NOTHING_ALLOWED

# Draws that are processed together, where all draws of a step are made at once (on a GPU):
# processing takes several times the memory of their logits.
PROCESSED_AT_ONCE = 16
Result = TypeVar("Result")


class Draws(NamedTuple):
    """Holds the sampling parameters of each draw, and what its noise depends on."""

    temperature_R: jax.Array
    top_k_R: jax.Array
    top_p_R: jax.Array
    min_p_R: jax.Array
    seed_R2: jax.Array
    sample_index_R: jax.Array
    position_R: jax.Array  # the position of the drawn token


class DrawnFrom(NamedTuple):
    """Holds the distributions that drafts were drawn from: the probabilities of W tokens.

    All other tokens have the probability 0.
    """

    ids_RW: jax.Array
    q_RW: jax.Array


def draws_of(inputs: StepInputs) -> Draws:
    """Returns the parameters of the step's own draws."""
    draws = inputs.draws
    return Draws(*_cuts_of(inputs), draws.seed_R2, draws.sample_index_R, draws.drawn_position_R)


def _cuts_of(inputs: StepInputs) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns what logits are divided by, and what cuts them off, in the order of `Draws`."""
    draws = inputs.draws
    return draws.temperature_R, draws.top_k_R, draws.top_p_R, draws.min_p_R


class Stream:
    """Names the noise that is not a draw's own.

    The number of a stream is folded into the seed before all else; no sample index is as large.
    """

    DRAFT = 0xFFFFFFFF  # draws drafts
    # Decides whether a draft is rejected; its number among those after the same token is folded in.
    ACCEPT = 0xFFFFFFFE
    RESIDUAL = 0xFFFFFFFD  # draws the token after rejected drafts


def noise_key(
    seed_2: jax.Array, sample_index: jax.Array, position: jax.Array, stream: int | None = None
) -> jax.Array:
    """Returns the key of a draw's noise, or that of another stream's noise for the same draw."""
    # Named, so that JAX's setting of a default generator changes no text.
    key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
    if stream is not None:
        key = jax.random.fold_in(key, stream)
    return jax.random.fold_in(jax.random.fold_in(key, sample_index), position)


def draw(
    logits_BV: Float[Array, "B V"],
    inputs: StepInputs,
    processor_inputs: ProcessorInputs,
    *,
    by_row: bool,
    scaled_BV: Float[Array, "B V"] | None = None,
) -> Int[Array, "B"]:
    """Returns one token id per row; NOT_FINITE or NOTHING_ALLOWED where none can be chosen.

    With `by_row` it loops over rows instead of one wide computation: on CPU greedy rows then cost
    no noise, and a row's sums have one shape.

    Args:
        logits_BV: The model's logits.
        inputs: The metadata of the step.
        processor_inputs: The wide arrays of logits processors.
        by_row: Computes one row at a time.
        scaled_BV: What `scale_logits` returns; None computes it.
    """
    is_finite_B = are_finite(logits_BV)
    if not by_row:
        token_ids_B = _draw_at_once(logits_BV, inputs, processor_inputs)
    else:
        if scaled_BV is None:
            scaled_BV = scale_logits(logits_BV, inputs, processor_inputs, by_row=True)
        token_ids_B = _draw_each(scaled_BV, draws_of(inputs), inputs.flags)
    return jnp.where(is_finite_B, token_ids_B, NOT_FINITE)


def _draw_each(scaled_RV: jax.Array, draws: Draws, flags: jax.Array) -> jax.Array:
    """Draws from one row after the other, whose logits are scaled and cut off."""

    def draw_row(row: tuple[jax.Array, Draws]) -> jax.Array:
        scaled_V, draw = row
        key = noise_key(draw.seed_R2, draw.sample_index_R, draw.position_R)
        return jax.lax.cond(
            draw.temperature_R > 0.0,
            lambda: with_noise(scaled_V, key),
            lambda: _first_of_the_largest(scaled_V),
        )

    return jax.lax.cond(
        flags[Flags.RANDOM] > 0,
        lambda: jax.lax.map(draw_row, (scaled_RV, draws)),
        lambda: jax.vmap(_first_of_the_largest)(scaled_RV),
    )


def _draw_wide(logits_RV: jax.Array, draws: Draws, flags: jax.Array) -> jax.Array:
    """Draws from all rows at once, whose logits are processed."""

    def random() -> jax.Array:
        return _each_draw(_draw_row, (logits_RV, *draws), by_row=False)

    def greedy() -> jax.Array:
        return jax.vmap(functools.partial(_first_of_the_largest, in_one_pass=True))(logits_RV)

    return jax.lax.cond(flags[Flags.RANDOM] > 0, random, greedy)


def _draw_at_once(
    logits_RV: jax.Array, inputs: StepInputs, processor_inputs: ProcessorInputs
) -> jax.Array:
    """Draws from rows that are computed at once, without a second array as large as the logits.

    Where logits are processed, it draws from some rows at a time.
    """
    rows = logits_RV, processor_inputs, penalties_of(inputs), draws_of(inputs)

    def process(rows: tuple[Any, ...]) -> jax.Array:
        some_BV, some_inputs, penalties, draws = rows
        some_BV = process_rows(some_BV, inputs.flags, some_inputs, penalties, by_row=False)
        return _draw_wide(some_BV, draws, inputs.flags)

    return jax.lax.cond(
        are_processed(inputs.flags),
        lambda: in_parts(process, rows, jnp.zeros(logits_RV.shape[0], jnp.int32)),
        lambda: _draw_wide(logits_RV, draws_of(inputs), inputs.flags),
    )


def in_parts(function: Callable[[Any], Result], rows: Any, results: Result) -> Result:
    """Returns what a function gives for all rows, of which it takes some at a time.

    Otherwise processing would take several times the memory of the logits.

    Args:
        function: Takes rows, and returns arrays with an entry for each.
        rows: Arrays with an entry for each row.
        results: Arrays for what the function returns, of all rows.
    """
    num_rows = jax.tree.leaves(results)[0].shape[0]
    at_once = min(PROCESSED_AT_ONCE, num_rows)

    def compute(index: jax.Array, results: Result) -> Result:
        # Rows are taken by place, because XLA keeps a loop that takes slices out of CUDA graphs.
        # The last rows may be computed twice, with the same result.
        index_B = jnp.minimum(index * at_once, num_rows - at_once) + jnp.arange(at_once)
        some = function(jax.tree.map(lambda leaf: jnp.asarray(leaf)[index_B], rows))
        computed: Result = jax.tree.map(
            lambda array, part: array.at[index_B].set(part), results, some
        )
        return computed

    filled: Result = jax.lax.fori_loop(0, -(-num_rows // at_once), compute, results)
    return filled


def are_finite(logits_BV: Float[Array, "B V"]) -> Bool[Array, "B"]:
    """Returns which rows have no NaN, no positive infinity, and a logit above minus infinity.

    It makes comparisons, because a wide maximum of XLA:CPU loses a NaN.
    """
    return jnp.all(logits_BV < jnp.inf, axis=-1) & jnp.any(logits_BV > -jnp.inf, axis=-1)


def each_row(function: Callable[..., Any], rows: tuple[Any, ...], *, by_row: bool) -> Any:
    """Applies a function to each row, in a loop or to all rows at once."""
    if by_row:
        return jax.lax.map(lambda row: function(*row), rows)
    return jax.vmap(function)(*rows)


def _each_draw(function: Callable[..., Any], rows: tuple[Any, ...], *, by_row: bool) -> Any:
    """Applies a function to each draw.

    Args:
        function: Takes the entries of `rows`, and `by_row`, `requested` and `minimum`: the least
            logit that stays, where a kernel has found it.
        rows: Logits, temperature, top-k, top-p, min-p, and more.
        by_row: Loops over the draws.
    """
    if by_row:
        return each_row(
            functools.partial(function, by_row=True, requested=None, minimum=None),
            rows,
            by_row=True,
        )
    logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, *_ = rows

    def any_random(wants_R: jax.Array) -> jax.Array:
        return jnp.any((temperature_R > 0.0) & wants_R)

    cuts_R = (top_k_R > 0) & (top_k_R < logits_RV.shape[1])
    nucleus_R = top_p_R < 1.0
    requested = RequestedTruncation(
        any_random(cuts_R), any_random(nucleus_R), any_random(nucleus_R | (min_p_R > 0.0))
    )
    function = functools.partial(function, by_row=False, requested=requested)
    if (kernels := kernels_in_use()) is None:
        return each_row(functools.partial(function, minimum=None), rows, by_row=False)
    cutoff_R = jax.lax.cond(
        requested.top_k | requested.top_p_or_min_p,
        lambda: kernels.cutoffs(
            logits_RV, jnp.max(logits_RV, axis=1), temperature_R, top_k_R, top_p_R, min_p_R
        ),
        lambda: jnp.full(logits_RV.shape[0], -jnp.inf, jnp.float32),
    )
    return jax.vmap(lambda minimum, *row: function(*row, minimum=minimum))(cutoff_R, *rows)


def perturb_logits(
    logits_RV: Float[Array, "R V"], draws: Draws, is_random: jax.Array, *, by_row: bool
) -> Float[Array, "R V"]:
    """Returns the numbers of which `draw` takes the largest.

    They are cut off and have noise where a draw is random, and are the logits themselves where it
    is greedy. `is_random` says whether any draw is random.
    """

    def perturb(
        logits_V: jax.Array, temperature: jax.Array, *cuts: jax.Array, **options: Any
    ) -> jax.Array:
        noisy = functools.partial(_perturb, logits_V, temperature, *cuts, **options)
        return where_requested(temperature > 0.0, options["requested"], "", noisy, lambda: logits_V)

    return jax.lax.cond(
        is_random,
        lambda: _each_draw(perturb, (logits_RV, *draws), by_row=by_row),
        lambda: logits_RV,
    )


def scale_logits(
    logits_RV: Float[Array, "R V"],
    inputs: StepInputs,
    processor_inputs: ProcessorInputs,
    *,
    by_row: bool,
) -> Float[Array, "R V"]:
    """Returns the logits of the distributions that `draw` draws from.

    They are -inf for tokens that cannot be drawn. A greedy draw has the logits that it compares:
    those after masks, biases and penalties, as in vLLM.
    """

    def scale_all() -> jax.Array:
        processed_RV = process_logits(logits_RV, inputs, processor_inputs, by_row=by_row)
        rows = (processed_RV, *_cuts_of(inputs))
        scaled_RV: jax.Array = _each_draw(_scale_row, rows, by_row=by_row)
        return scaled_RV

    if not by_row:
        return scale_all()
    changes_any = are_processed(inputs.flags) | (inputs.flags[Flags.RANDOM] > 0)
    return jax.lax.cond(changes_any, scale_all, lambda: logits_RV)


def draw_draft(
    logits_RV: Float[Array, "R V"], draws: Draws, *, by_row: bool
) -> tuple[Int[Array, "R"], DrawnFrom]:
    """Draws drafts for acceptance by rejection, and returns what they were drawn from, too.

    A distribution has the most likely `MAX_CANDIDATES` tokens of what `draw` draws from; that of a
    greedy row has the most likely one alone. The noise has a stream of its own.
    """

    def draw_row(
        logits_V: jax.Array, temperature: jax.Array, *cuts: jax.Array, **options: Any
    ) -> Any:
        *cutoffs, seed_2, sample_index, position = cuts
        log_q_V = _distribution(logits_V, temperature, *cutoffs, **options)
        log_q_W, ids_W = jax.lax.top_k(log_q_V[None], min(MAX_CANDIDATES, log_q_V.shape[0]))
        key = noise_key(seed_2, sample_index, position, Stream.DRAFT)
        # It is negative where no token can be drawn; the target's draw says so, too.
        place = jnp.maximum(with_noise(log_q_W[0], key), 0)
        lacking = (0, MAX_CANDIDATES - ids_W.shape[1])
        padded_W = jnp.pad(ids_W[0].astype(jnp.int32), lacking, constant_values=-1)
        return ids_W[0, place], DrawnFrom(padded_W, jnp.pad(jax.nn.softmax(log_q_W[0]), lacking))

    drawn: tuple[jax.Array, DrawnFrom] = _each_draw(draw_row, (logits_RV, *draws), by_row=by_row)
    return drawn


def _draw_row(
    logits_V: jax.Array, temperature: jax.Array, *cuts: jax.Array, **options: Any
) -> jax.Array:
    perturbed_V = _perturb(logits_V, temperature, *cuts, **options)
    return _first_of_the_largest(
        jnp.where(temperature > 0.0, perturbed_V, logits_V), in_one_pass=True
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
    scaled_V = _scale(logits_V, temperature, top_k, top_p, min_p, **options)
    return scaled_V + jax.random.gumbel(
        noise_key(seed_2, sample_index, position), logits_V.shape, jnp.float32
    )


def with_noise(logits_V: Float[Array, "V"], key: jax.Array) -> Int[Array, ""]:
    """Returns a token drawn from these logits; NOTHING_ALLOWED if there is none."""
    return _first_of_the_largest(logits_V + jax.random.gumbel(key, logits_V.shape, jnp.float32))


def distributions(
    logits_BV: Float[Array, "B V"],
    inputs: StepInputs,
    processor_inputs: ProcessorInputs,
    *,
    by_row: bool,
    scaled_BV: Float[Array, "B V"] | None = None,
) -> Float[Array, "B V"]:
    """Returns the log probabilities of what `draw` draws; a greedy row has 0 for its token.

    They are all -inf where no token can be chosen. The arguments are those of `draw`.
    """
    is_finite_B = are_finite(logits_BV)
    if not by_row:
        logits_BV = process_logits(logits_BV, inputs, processor_inputs, by_row=False)
        log_p_BV = _each_draw(_distribution, (logits_BV, *_cuts_of(inputs)), by_row=False)
    else:
        if scaled_BV is None:
            scaled_BV = scale_logits(logits_BV, inputs, processor_inputs, by_row=True)
        log_p_BV = each_row(_normalise, (scaled_BV, inputs.draws.temperature_R), by_row=True)
    return jnp.where(is_finite_B[:, None], log_p_BV, -jnp.inf)


def _distribution(
    logits_V: jax.Array, temperature: jax.Array, *cuts: jax.Array, **options: Any
) -> jax.Array:
    return _normalise(_scale_row(logits_V, temperature, *cuts, **options), temperature)


def _normalise(scaled_V: jax.Array, temperature: jax.Array) -> jax.Array:
    """Returns the log probabilities of scaled logits; those of a greedy row have one token."""

    def keep_first() -> jax.Array:
        place_V = jnp.arange(scaled_V.shape[0])
        return jnp.where(place_V == _first_of_the_largest(scaled_V), 0.0, -jnp.inf)

    chosen_V = jax.lax.cond(temperature > 0.0, lambda: scaled_V, keep_first)
    # A softmax without any finite logit is NaN.
    return jnp.where(jnp.isfinite(jnp.max(chosen_V)), jax.nn.log_softmax(chosen_V), -jnp.inf)


def _scale_row(
    logits_V: jax.Array, temperature: jax.Array, *cuts: jax.Array, **options: Any
) -> jax.Array:
    """Returns the logits divided and cut off where the draw is random, else as they are."""
    scaled = functools.partial(_scale, logits_V, temperature, *cuts, **options)
    return where_requested(temperature > 0.0, options["requested"], "", scaled, lambda: logits_V)


def _scale(
    logits_V: jax.Array,
    temperature: jax.Array,
    *cuts: jax.Array,
    minimum: jax.Array | None,
    **options: Any,
) -> jax.Array:
    """Returns the logits divided by the temperature, and cut off."""
    if minimum is None:
        return truncate(logits_V / temperature, *cuts, **options)
    return jnp.where(logits_V >= minimum, logits_V / temperature, -jnp.inf)


def largest_of(logits_V: Float[Array, "V"]) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Returns the largest logit and the first place that has it.

    These are two plain reductions, which XLA vectorises on CPU.
    """
    largest = jnp.max(logits_V)
    index_V = jnp.arange(logits_V.shape[0], dtype=jnp.int32)
    return largest, jnp.min(jnp.where(logits_V == largest, index_V, logits_V.shape[0]))


def _first_in_one_pass(logits_V: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what `largest_of` returns, in one reduction.

    For two reductions XLA on a GPU would write the changed logits to memory.
    """

    def larger(first: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        takes_one = (first[0] > other[0]) | ((first[0] == other[0]) & (first[1] < other[1]))
        return jnp.where(takes_one, first[0], other[0]), jnp.where(takes_one, first[1], other[1])

    index_V = jnp.arange(logits_V.shape[0], dtype=jnp.int32)
    start = jnp.float32(-jnp.inf), jnp.int32(logits_V.shape[0])
    largest, first = jax.lax.reduce((logits_V, index_V), start, larger, (0,))
    return largest, first


def _first_of_the_largest(logits_V: jax.Array, *, in_one_pass: bool = False) -> jax.Array:
    """Returns the first place of the largest logit; NOTHING_ALLOWED if that is not finite."""
    largest, first = (_first_in_one_pass if in_one_pass else largest_of)(logits_V)
    return jnp.where(jnp.isfinite(largest), first, NOTHING_ALLOWED)
