"""Chooses the experts of tokens, and sorts rows by expert, each in one launch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton.backend import kernel_call, load, store
from pallas_kernels.triton.rows import row_call, scores_of

NO_EXPERT = 1 << 30  # above all experts, for a minimum
COLS = 1024  # the numbers of a row that a program copies
# Each pair is compared with all, whose groups a program has in registers.
MAX_PAIRS = 2048


@functools.partial(jax.jit, static_argnames=("count", "sigmoid", "interpret"))
def choose_experts(
    logits_TE: jax.Array,
    correction_E: jax.Array | None,
    count: int,
    *,
    sigmoid: bool,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns scores and experts; see `expert_routing.choose_experts`. A program takes a row."""
    num_tokens, num_experts = logits_TE.shape
    shape = (num_tokens, count)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (logits_TE.dtype, jnp.int32)]
    body = functools.partial(_choose, width=num_experts, count=count, sigmoid=sigmoid)
    call = row_call(body, "choose_experts", (num_tokens,), shapes, num_experts, interpret)
    return tuple(call(logits_TE, correction_E))


def _choose(
    logits_ref: Any,
    correction_ref: Any,
    scores_ref: Any,
    expert_ref: Any,
    *,
    width: int,
    count: int,
    sigmoid: bool,
) -> None:
    row = pl.program_id(0)
    at_E = jnp.arange(pl.next_power_of_2(width))
    has_E = at_E < width
    scores_E = scores_of(
        load(logits_ref.at[row, at_E], mask=has_E, other=-jnp.inf), sigmoid=sigmoid
    )
    rated_E = scores_E
    if correction_ref is not None:
        rated_E = rated_E + load(correction_ref.at[at_E], mask=has_E, other=0.0)
    # What is no number is rated highest, as by `jax.lax.top_k`, so that it is seen in the output.
    rated_E = jnp.where(jnp.isnan(rated_E), jnp.inf, rated_E)

    def take(place: Any, left_E: jax.Array) -> jax.Array:
        is_best_E = left_E == jnp.max(left_E)
        expert = jnp.min(jnp.where(is_best_E, at_E, NO_EXPERT))
        is_taken_E = at_E == expert
        store(expert_ref.at[row, place], expert)
        store(scores_ref.at[row, place], jnp.sum(jnp.where(is_taken_E, scores_E, 0.0)))
        return jnp.where(is_taken_E, -jnp.inf, left_E)

    jax.lax.fori_loop(0, count, take, jnp.where(has_E, rated_E, -jnp.inf))


@functools.partial(jax.jit, static_argnames=("num_groups", "interpret"))
def gather_by_group(
    x_TI: jax.Array, group_P: jax.Array, num_groups: int, *, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Returns rows by group, places, groups and counts; see `expert_routing.gather_by_group`.

    A program takes a pair of a row and a group: it counts the pairs that come before its own, which
    is its place, and copies its row there. It also counts the pairs of one group.

    Raises:
        NotImplementedError: There are more than `MAX_PAIRS` pairs.
    """
    num_rows, width = x_TI.shape
    num_pairs = len(group_P)
    if num_pairs > MAX_PAIRS:
        raise NotImplementedError(f"{num_pairs} pairs to sort (at most {MAX_PAIRS})")
    cols = min(COLS, pl.next_power_of_2(width))
    body = functools.partial(_gather, per_row=num_pairs // num_rows, cols=cols)
    call = kernel_call(
        body,
        name="gather_by_group",
        grid=(max(num_pairs, num_groups), pl.cdiv(width, cols)),
        out_shape=[
            jax.ShapeDtypeStruct((num_pairs, width), x_TI.dtype),
            *(
                jax.ShapeDtypeStruct((num,), jnp.int32)
                for num in (num_pairs, num_pairs, num_groups)
            ),
        ],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )
    return tuple(call(x_TI, group_P))


def _gather(
    x_ref: Any,
    group_ref: Any,
    out_ref: Any,
    place_ref: Any,
    sorted_ref: Any,
    count_ref: Any,
    *,
    per_row: int,
    cols: int,
) -> None:
    index = pl.program_id(0)  # of a pair, and of a group
    at_I = pl.program_id(1) * cols + jnp.arange(cols)
    num_pairs, width = out_ref.shape
    num_groups = count_ref.shape[0]
    at_P = jnp.arange(pl.next_power_of_2(num_pairs))
    has_P = at_P < num_pairs
    group_P = _group(load(group_ref.at[at_P], mask=has_P, other=0), num_groups)

    @pl.when(index < num_groups)
    def _count() -> None:
        store(count_ref.at[index], _number(has_P & (group_P == index)))

    @pl.when(index < num_pairs)
    def _copy() -> None:
        group = _group(load(group_ref.at[index]), num_groups)
        is_before_P = (group_P < group) | ((group_P == group) & (at_P < index))
        place = _number(has_P & is_before_P)
        store(place_ref.at[index], place)
        # The programs of the row's other columns store the same numbers here.
        store(sorted_ref.at[place], group)
        x_I = load(x_ref.at[jax.lax.div(index, per_row), at_I], mask=at_I < width, other=0)
        store(out_ref.at[place, at_I], x_I, mask=at_I < width)


def _group(group: Any, num_groups: int) -> Any:
    """Returns the number of a group; that of no group becomes the one after the last."""
    return jnp.where((group >= 0) & (group < num_groups), group, num_groups)


def _number(is_counted_P: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(is_counted_P, 1, 0))
