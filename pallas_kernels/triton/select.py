"""Selects in rows of logits with Triton kernels: a program takes a row, and reads it a few times.

A cut-off is searched between two floats. The row has enough numbers (or mass) at or above the lower
one, and too few at or above the higher one. One reading of the row tries three floats between them:

    low    try   try   try   high        enough at or above the second, too few at or above the
    third |------|-----|-----|------|    ->         |-----|

The search ends when only one number of the row is between them, or no float. `selection` says what
is exact about that, and why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.selection import check_vocabulary, digits, key_of, mass, value_of, weights
from pallas_kernels.triton import backend
from pallas_kernels.triton.backend import load, store

TILE = 4096  # the numbers of a row that a program reads at once
WARPS = 32
LOWEST = int(np.float32(-np.inf).view(np.int32)) ^ 0x7FFFFFFF  # the key of -inf
# So many tries divide the distance of values; later ones divide that of keys, which always ends.
BY_VALUE = 6


class Bracket(NamedTuple):
    """Holds the two ends of a search.

    Attributes:
        low: The key of the lower float; see `value_of`.
        high: The key of the higher float.
        at_low: How many numbers of the row are at or above the lower one.
        at_high: How many numbers of the row are at or above the higher one.
    """

    low: jax.Array
    high: jax.Array
    at_low: jax.Array
    at_high: jax.Array


def cutoffs(
    logits_RV: jax.Array,
    largest_R: jax.Array,
    temperature_R: jax.Array,
    top_k_R: jax.Array,
    top_p_R: jax.Array,
    min_p_R: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Returns min_R: the least logit of each row that top-k, top-p and min-p keep.

    It is -inf for a row that asks for none of them, or is greedy.
    """
    num_rows, vocab_size = logits_RV.shape
    check_vocabulary(vocab_size)
    call = backend.kernel_call(
        functools.partial(_cutoffs_kernel, tile=_tile(vocab_size)),
        name="cutoffs",
        grid=(num_rows,),
        out_shape=[jax.ShapeDtypeStruct((num_rows,), jnp.float32)],
        num_warps=WARPS,
        num_stages=1,
        interpret=interpret,
    )
    (min_R,) = call(logits_RV, largest_R, temperature_R, top_k_R, top_p_R, min_p_R)
    return min_R


def top_candidates(
    logits_RV: jax.Array,
    largest_R: jax.Array,
    log_sum_R: jax.Array,
    count: int,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the `count` largest of `logits - largest - log_sum`, and their ids.

    The two are values_RW and ids_RW. No logit of a row may be larger than its `largest`. Equal
    numbers are in the order of their ids; if there are more of them than are wanted, the first are
    taken. There is no other order.
    """
    num_rows, vocab_size = logits_RV.shape
    call = backend.kernel_call(
        functools.partial(_top_candidates_kernel, tile=_tile(vocab_size), count=count),
        name="top_candidates",
        grid=(num_rows,),
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, count), dtype) for dtype in (jnp.float32, jnp.int32)
        ],
        num_warps=WARPS,
        num_stages=1,
        interpret=interpret,
    )
    values_RW, ids_RW = call(logits_RV, largest_R, log_sum_R)
    return values_RW, ids_RW


def _tile(vocab_size: int) -> int:
    return min(TILE, max(32, pl.next_power_of_2(vocab_size)))


def _cutoffs_kernel(  # type: ignore[no-untyped-def]
    logits_ref,
    largest_ref,
    temperature_ref,
    top_k_ref,
    top_p_ref,
    min_p_ref,
    min_ref,
    *,
    tile: int,
):
    row = pl.program_id(0)
    vocab_size = logits_ref.shape[1]
    temperature = load(temperature_ref.at[row])
    top_k = load(top_k_ref.at[row])
    top_p = load(top_p_ref.at[row])
    min_p = load(min_p_ref.at[row])
    largest = load(largest_ref.at[row]) / temperature
    cuts = (top_k > 0) & (top_k < vocab_size)
    is_likely = (top_p < 1.0) | (min_p > 0.0)
    is_cut = (temperature > 0.0) & (cuts | is_likely)

    def scale(x: jax.Array) -> jax.Array:
        return x / temperature

    def likelihood_of(scaled_X: jax.Array, cutoff: jax.Array) -> jax.Array:
        return jnp.where(scaled_X >= cutoff, jnp.exp(scaled_X - largest), 0.0)

    turns = functools.partial(_each_tile, logits_ref, row, tile)

    @pl.when(~is_cut)
    def _all_stay() -> None:
        store(min_ref.at[row], jnp.float32(-jnp.inf))

    @pl.when(is_cut)
    def _search() -> None:
        # A branch cannot return a constant.
        all_of_them = jnp.minimum(top_p, -jnp.inf)
        all_likelihoods = jnp.minimum(min_p, 0.0)
        cutoff = jax.lax.cond(
            cuts,
            lambda: value_of(_at_least(turns, scale, top_k, largest, tile, vocab_size).low),
            lambda: all_of_them,
        )
        nucleus = jax.lax.cond(
            top_p < 1.0,
            lambda: _nucleus(
                turns, lambda x: likelihood_of(scale(x), cutoff), top_p, tile, vocab_size
            ),
            lambda: all_likelihoods,
        )

        def min_kept(x_X: jax.Array, _: jax.Array, min_X: jax.Array) -> jax.Array:
            scaled_X = scale(x_X)
            likelihood_X = likelihood_of(scaled_X, cutoff)
            is_kept_X = (scaled_X >= cutoff) & (likelihood_X >= nucleus) & (likelihood_X >= min_p)
            # The most likely token stays, whatever the cut-offs are.
            is_kept_X |= is_likely & (likelihood_X == 1.0)
            return jnp.where(is_kept_X, jnp.minimum(min_X, x_X), min_X)

        min_X = turns(min_kept, jnp.full(tile, jnp.inf, jnp.float32))
        store(min_ref.at[row], jnp.min(min_X))


def _each_tile(  # type: ignore[no-untyped-def]
    logits_ref, row: jax.Array, tile: int, add: Callable[..., Any], start: Any
) -> Any:
    """Goes over a row: calls `add(numbers, their places, state)` for each tile of it.

    The numbers after the end of the row are NaN, which no comparison takes.
    """
    vocab_size = logits_ref.shape[1]

    def turn(index: jax.Array, state: Any) -> Any:
        place = index * tile + jnp.arange(tile)
        mask = None if vocab_size % tile == 0 else place < vocab_size
        x = load(logits_ref.at[row, place], mask=mask, other=None if mask is None else jnp.nan)
        return add(x, place, state)

    return jax.lax.fori_loop(0, pl.cdiv(vocab_size, tile), turn, start)


def _at_least(
    turns: Callable[..., Any],
    value: Callable[[jax.Array], jax.Array],
    count: jax.Array | int,
    largest: jax.Array,
    tile: int,
    vocab_size: int,
) -> Bracket:
    """Brackets the largest float that at least `count` values of the row reach."""

    def at_or_above(tries: tuple[jax.Array, ...]) -> tuple[list[jax.Array], list[jax.Array]]:
        def add(x: jax.Array, _: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            value_X = value(x)
            return tuple(
                each + (value_X >= step).astype(jnp.int32)
                for each, step in zip(sums, tries, strict=True)
            )

        sums = turns(add, (jnp.zeros(tile, jnp.int32),) * len(tries))
        numbers = [jnp.sum(each) for each in sums]
        return numbers, [number >= count for number in numbers]

    # No number of the row is above the largest.
    high = key_of(largest) + 1
    first = tuple(key_of(largest - np.float32(distance)) for distance in (16.0, 7.0, 3.0))
    return _narrow(
        at_or_above,
        Bracket(jnp.int32(LOWEST), high, jnp.int32(vocab_size), jnp.int32(0)),
        first,
        BY_VALUE,
    )


def _nucleus(
    turns: Callable[..., Any],
    likelihood: Callable[[jax.Array], jax.Array],
    top_p: jax.Array,
    tile: int,
    vocab_size: int,
) -> jax.Array:
    """Returns the largest number such that the likelihoods that reach it have `top_p` of the mass.

    It can be another number that divides the row in the same way.
    """

    def masses(tries: tuple[jax.Array, ...]) -> tuple[list[jax.Array], list[jax.Array]]:
        def add(x: jax.Array, _: jax.Array, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            likelihood_X = likelihood(x)
            high_X, low_X = weights(likelihood_X)
            added = []
            for (number, high, low), step in zip(sums, tries, strict=True):
                reaches_X = likelihood_X >= step
                number += reaches_X.astype(jnp.int32)
                added.append(
                    (
                        number,
                        high + jnp.where(reaches_X, high_X, 0),
                        low + jnp.where(reaches_X, low_X, 0),
                    )
                )
            return tuple(added)

        zeros = jnp.zeros(tile, jnp.int32)
        sums = turns(add, ((zeros,) * 3,) * len(tries))
        masses_of_tries = [mass(tuple(map(jnp.sum, digits(high, low)))) for _, high, low in sums]
        return [jnp.sum(number) for number, _, _ in sums], masses_of_tries

    (total,) = masses((jnp.float32(0.0),))[1]
    target_mass = top_p * total

    def at_or_above(tries: tuple[jax.Array, ...]) -> tuple[list[jax.Array], list[jax.Array]]:
        numbers, masses_of_tries = masses(tries)
        return numbers, [each >= target_mass for each in masses_of_tries]

    bracket = Bracket(
        jnp.int32(0), jnp.int32(_power_of_two(0) + 1), jnp.int32(vocab_size), jnp.int32(0)
    )
    first = tuple(jnp.int32(_power_of_two(exponent)) for exponent in (-16, -9, -4))
    return value_of(_narrow(at_or_above, bracket, first, 0).low)


def _narrow(
    at_or_above: Callable[[tuple[jax.Array, ...]], tuple[list[jax.Array], list[jax.Array]]],
    bracket: Bracket,
    first: tuple[jax.Array, ...],
    by_value: int,
) -> Bracket:
    """Narrows a bracket until at most one number of the row is in it, or all in it are equal.

    Args:
        at_or_above: Returns for some floats how many numbers reach each, and whether that is
            enough.
        bracket: The bracket.
        first: The keys of the first tries, in ascending order.
        by_value: How many tries divide the distance of the values.
    """

    def goes_on(state: tuple[Bracket, jax.Array]) -> jax.Array:
        (low, high, at_low, at_high), _ = state
        return (low + 1 < high) & (at_low - at_high > 1)

    def narrow(state: tuple[Bracket, jax.Array]) -> tuple[Bracket, jax.Array]:
        (low, high, at_low, at_high), turn = state
        middle = _between(low, high)
        tries: tuple[jax.Array, ...] = (_between(low, middle), middle, _between(middle, high))
        if by_value:
            bottom = value_of(low)
            top = value_of(high)
            values = [bottom + (top - bottom) * np.float32(share) for share in (0.25, 0.5, 0.75)]
            # There is no distance from -inf to divide.
            divides = (turn <= by_value) & (low > LOWEST)
            tries = tuple(
                jnp.where(divides, key_of(value), other)
                for value, other in zip(values, tries, strict=True)
            )
        tries = tuple(
            jnp.where(turn == 0, value, other) for value, other in zip(first, tries, strict=True)
        )
        numbers, are_enough = at_or_above(tuple(value_of(value) for value in tries))
        for key, number, is_enough in zip(tries, numbers, are_enough, strict=True):
            rises = is_enough & (key > low)
            low = jnp.where(rises, key, low)
            at_low = jnp.where(rises, number, at_low)
            falls = ~is_enough & (key < high)
            high = jnp.where(falls, key, high)
            at_high = jnp.where(falls, number, at_high)
        return Bracket(low, high, at_low, at_high), turn + 1

    narrowed: Bracket = jax.lax.while_loop(goes_on, narrow, (bracket, jnp.int32(0)))[0]
    return narrowed


def _power_of_two(exponent: int) -> int:
    """Returns the key of a power of two."""
    return (127 + exponent) << 23


def _between(low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns the mean of two keys, rounded down, without their sum, which may overflow."""
    return (low & high) + ((low ^ high) >> 1)


def _top_candidates_kernel(  # type: ignore[no-untyped-def]
    logits_ref, largest_ref, log_sum_ref, values_ref, ids_ref, *, tile: int, count: int
):
    row = pl.program_id(0)
    vocab_size = logits_ref.shape[1]
    largest = load(largest_ref.at[row])
    log_sum = load(log_sum_ref.at[row])

    def normalise(x: jax.Array) -> jax.Array:
        return x - largest - log_sum

    turns = functools.partial(_each_tile, logits_ref, row, tile)
    low, high, _, at_high = _at_least(turns, normalise, count, normalise(largest), tile, vocab_size)
    bottom = value_of(low)
    top = value_of(high)

    def take(
        x: jax.Array, place: jax.Array, taken: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        num_above, num_level = taken
        value_X = normalise(x)
        above_X = value_X >= top
        level_X = (value_X >= bottom) & (value_X < top)
        # Two running counts are in one integer: each is less than 2^16 in a tile.
        counts_X = jnp.cumsum(above_X.astype(jnp.int32) | level_X.astype(jnp.int32) << 16)
        index_X = (
            jnp.where(
                above_X, num_above + (counts_X & 0xFFFF), at_high + num_level + (counts_X >> 16)
            )
            - 1
        )
        taken_X = (above_X | level_X) & (index_X < count)
        # In the interpreter a masked store still needs a valid place.
        index_X = jnp.where(taken_X, index_X, count)
        store(values_ref.at[row, index_X], value_X, mask=taken_X)
        store(ids_ref.at[row, index_X], place, mask=taken_X)
        return num_above + jnp.sum(above_X.astype(jnp.int32)), num_level + jnp.sum(
            level_X.astype(jnp.int32)
        )

    num_above, num_level = turns(take, (jnp.int32(0), jnp.int32(0)))
    # A row with NaN may have fewer numbers than wanted: fill the rest.
    index_W = jnp.arange(pl.next_power_of_2(count))
    lacks_W = (index_W >= num_above + num_level) & (index_W < count)
    store(values_ref.at[row, index_W], jnp.full(index_W.shape, -jnp.inf, jnp.float32), mask=lacks_W)
    store(ids_ref.at[row, index_W], jnp.zeros(index_W.shape, jnp.int32), mask=lacks_W)
