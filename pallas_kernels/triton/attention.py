"""Computes paged attention with a Triton kernel (see `sets.triton`).

It has more letters for shapes. A is lanes, the rows of a tile's products: query tokens times the G
query heads of one key/value head, then padding. All heads share latents; a tile has only a part of
the heads then. C is the positions of a turn, and F the fields of a tile's schedule.

If sums are ordered, the context is in segments of `Tiles.split_context` positions from position 0
on. Each is summed on its own, and they are added up in order: by the program that goes through
them, or by `reduce.fold_splits` if each has a program of its own. Sums over the positions of a turn
are then products with ones, since a tensor core adds up in the same order for any tile, which a
sum over the threads of a tile does not.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.tiles import Tiles
from pallas_kernels.triton import backend as tb
from pallas_kernels.triton.reduce import LOG2_E, LOWEST, fold, start


@dataclass(frozen=True)
class Config:
    """Holds the constants that a kernel is compiled for, apart from shapes.

    Attributes:
        tiles: The way the work is cut.
        group: The query heads of a program.
        programs: The programs that share a key/value head.
        query_tokens: The most query tokens of a tile.
        options: The options of attention, without arrays.
        interpret: Says whether the kernel runs on CPU.
        is_ordered: True if sums have one order for any tiles with these turns and segments.
    """

    tiles: Tiles
    group: int
    programs: int
    query_tokens: int
    options: AttentionOptions
    interpret: bool
    is_ordered: bool = False

    @property
    def folds(self) -> bool:
        """Returns whether a program goes through all segments and adds them up."""
        return self.is_ordered and self.tiles.max_splits == 1


@dataclass(frozen=True)
class Tile:
    """Holds a program's tile, which is a row of the schedule.

    Attributes:
        row: The row of the step.
        token: The tile's first token in the stream.
        count: The number of its tokens.
        position: The position of its first token.
        origin: The position of the first query token of its row.
        begin: The first position that any of its tokens sees.
        end: The position after the last one that any of them sees.
        share: The turns of a split.
    """

    row: jax.Array
    token: jax.Array
    count: jax.Array
    position: jax.Array
    origin: jax.Array
    begin: jax.Array
    end: jax.Array
    share: jax.Array


@dataclass(frozen=True)
class Lanes:
    """Holds the rows of a tile's products: query tokens times G query heads, then padding."""

    token_A: jax.Array  # the token's place in the tile
    head_A: jax.Array
    used_A: jax.Array

    @classmethod
    def of(cls, tile: Tile, heads: jax.Array, config: Config) -> Lanes:
        """Returns the lanes of a tile for one group of query heads."""
        lane_A = jnp.arange(config.tiles.query_rows)
        token_A = lane_A // config.group
        return cls(
            token_A,
            heads * config.group + lane_A % config.group,
            lane_A < tile.count * config.group,
        )


@dataclass(frozen=True)
class Columns:
    """Holds columns of keys, padded to a power of two: Triton's products have no other width.

    Latents are cut into their values and the rest.
    """

    at_H: jax.Array
    width: int
    first: int = 0

    @property
    def column_H(self) -> jax.Array:
        """Returns the places of the columns in a key."""
        return self.at_H + self.first if self.first else self.at_H

    @property
    def inside_H(self) -> jax.Array:
        """Returns which columns are no padding."""
        return self.at_H < self.width

    @property
    def masked(self) -> bool:
        """Returns whether there is padding."""
        return self.at_H.shape[0] != self.width

    @classmethod
    def of(cls, width: int, value_width: int | None) -> list[Columns]:
        """Returns the columns of keys; for latents those of the values, then the others."""
        cuts = (
            [(0, width)]
            if value_width in (None, width)
            else [(0, value_width), (value_width, width)]
        )
        sizes = [(first, stop - first) for first, stop in cuts]
        return [
            # A side of a product in Triton has at least 16 numbers.
            cls(jnp.arange(max(16, pl.next_power_of_2(size))), size, first)
            for first, size in sizes
        ]


def kernel(  # type: ignore[no-untyped-def]
    schedule_ref,
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    tree_ref,
    k_scale_ref,
    v_scale_ref,
    sinks_ref,
    *out_refs,
    config: Config,
) -> None:
    """Computes the attention of one tile over one split of its context."""
    # A GPU starts programs in order. The last tiles of a prompt see the most, so they go first.
    tile_index = schedule_ref.shape[0] - 1 - pl.program_id(0)
    heads = pl.program_id(1)
    split = pl.program_id(2)
    kv_head = heads if config.programs == 1 else heads // config.programs
    tile = Tile(*(tb.load(schedule_ref.at[tile_index, np.int32(field)]) for field in range(8)))
    context = config.tiles.context
    segment = config.tiles.split_context // context  # in turns
    first = tile.begin // context
    origin = first // segment * segment if config.is_ordered else first
    # With a window the first segment may begin before anything that the tile sees.
    first = jnp.maximum(origin + split * tile.share, first)
    stop = jnp.minimum(origin + (split + 1) * tile.share, pl.cdiv(tile.end, context))

    @pl.when(first < stop)
    def _() -> None:
        lanes = Lanes.of(tile, heads, config)
        all_columns = Columns.of(q_ref.shape[2], config.options.value_width)
        of_values, *_ = all_columns
        at_A = tile.token + lanes.token_A, lanes.head_A

        def queries(columns: Columns) -> jax.Array:
            mask_AH = lanes.used_A[:, None] & columns.inside_H[None, :]
            at_AH = at_A[0][:, None], at_A[1][:, None], columns.column_H[None, :]
            return tb.load(q_ref.at[at_AH], mask=mask_AH, other=0.0)

        all_q = [queries(columns) for columns in all_columns]
        q_AH, *_ = all_q
        factor = _factor(config)
        exp2_of = functools.partial(tb.exp2_of, interpret=config.interpret)

        def turn(index, carry, *, masked):  # type: ignore[no-untyped-def]
            position_C = index * config.tiles.context + jnp.arange(config.tiles.context)
            needed_C = (position_C >= tile.begin) & (position_C < tile.end) if masked else None
            place = _place(table_ref, tile.row, position_C, needed_C, k_ref.shape[1])
            all_k = [
                _read(k_ref, place, kv_head, columns, needed_C, q_AH.dtype)
                for columns in all_columns
            ]
            matmuls = [
                tb.dot(q, k, trans_b=True, precision=lax.Precision.HIGHEST)
                for q, k in zip(all_q, all_k, strict=True)
            ]
            scores_AC = functools.reduce(operator.add, matmuls)
            scores_AC = _scores(
                scores_AC, _read_scale(k_scale_ref, place, kv_head, needed_C), config
            )
            if needed_C is not None:
                seen_AC = _find_visible(tile, lanes, position_C, tree_ref, config)
                scores_AC = jnp.where(seen_AC & needed_C[None, :], scores_AC, -jnp.inf)
            top_A, total_A, sum_AH, *outer = carry
            new_top_A = jnp.maximum(top_A, jnp.max(scores_AC, axis=1) * factor)
            weights_AC = exp2_of(scores_AC, factor, new_top_A[:, None])
            shrink_A = exp2_of(top_A, 1.0, new_top_A)
            total_A = total_A * shrink_A + _sum(weights_AC, q_AH.dtype, config)
            v_scale_C = _read_scale(
                k_scale_ref if v_ref is None else v_scale_ref, place, kv_head, needed_C
            )
            # A weight times a scale may be out of float16's range, and bfloat16 is precise enough
            # for a value of eight bits.
            narrow = v_scale_C is not None and q_AH.dtype == jnp.float16
            v_CH = all_k[0]
            if v_ref is not None or narrow:
                dtype = jnp.bfloat16 if narrow else q_AH.dtype
                v_CH = _read(
                    k_ref if v_ref is None else v_ref, place, kv_head, of_values, needed_C, dtype
                )
            if v_scale_C is not None:
                weights_AC *= v_scale_C[None, :]
            values_AH = tb.dot(weights_AC.astype(v_CH.dtype), v_CH, precision=lax.Precision.HIGHEST)
            carry = new_top_A, total_A, sum_AH * shrink_A[:, None] + values_AH, *outer
            if not config.folds:
                return carry
            return lax.cond(
                lax.rem(index + 1, segment) == 0, fold_segment, lambda carry: carry, carry
            )

        def fold_segment(carry):  # type: ignore[no-untyped-def]
            inner, outer = carry[:3], carry[3:]
            return *no_segment, *fold(outer, inner, exp2_of)

        size = config.tiles.query_rows
        zeros_AH = jnp.zeros(q_AH.shape, jnp.float32)
        no_segment = jnp.full(size, LOWEST), jnp.zeros(size), zeros_AH
        carry: tuple[jax.Array, ...] = no_segment
        if config.folds or not config.is_ordered:  # or else `fold_splits` takes the sinks
            # Only the first split has the sinks, or they would be counted once for each split.
            used_A = lanes.used_A & (split == 0)
            carry = *start(sinks_ref, lanes.head_A, used_A), zeros_AH
        if config.folds:
            carry = *no_segment, *carry
        for low, high, masked in _stretches(tile, first, stop, config, tree=tree_ref is not None):
            carry = lax.fori_loop(low, high, functools.partial(turn, masked=masked), carry)
        top_A, total_A, sum_AH = fold_segment(carry)[3:] if config.folds else carry
        out_AH = sum_AH / jnp.where(total_A == 0.0, 1.0, total_A)[:, None]
        at_AH = at_A[0][:, None], at_A[1][:, None], of_values.at_H[None, :]
        mask_AH = lanes.used_A[:, None] & of_values.inside_H[None, :]
        if len(out_refs) == 1:
            tb.store(out_refs[0].at[at_AH], out_AH.astype(q_AH.dtype), mask=mask_AH)
        else:
            weight_A = jnp.where(total_A == 0.0, LOWEST, top_A + jnp.log2(total_A))
            of_lanes = [top_A, total_A] if config.is_ordered else [weight_A]
            all_AH = sum_AH if config.is_ordered else out_AH
            tb.store(out_refs[0].at[(split, *at_AH)], all_AH, mask=mask_AH)
            for out_ref, out_A in zip(out_refs[1:], of_lanes, strict=True):
                tb.store(out_ref.at[(split, *at_A)], out_A, mask=lanes.used_A)


def _sum(weights_AC: jax.Array, dtype: jnp.dtype, config: Config) -> jax.Array:
    """Returns the sum of each lane's weights; if it is ordered, that of what values are times."""
    if not config.is_ordered:
        return jnp.sum(weights_AC, axis=1)
    ones_CO = jnp.ones((weights_AC.shape[1], 16), dtype)
    sums_AO = tb.dot(weights_AC.astype(dtype), ones_CO, precision=lax.Precision.HIGHEST)
    return jnp.max(sums_AO, axis=1)  # of sixteen equal numbers


def _stretches(
    tile: Tile, first: jax.Array, stop: jax.Array, config: Config, *, tree: bool
) -> list[tuple[jax.Array, jax.Array, bool]]:
    """Returns the turns from `first` to `stop` in order, as (low, high, masked).

    Turns that every token sees whole need no mask. A tile of one token keeps to one loop, since
    between two loops the pipeline of loads runs dry.
    """
    if config.query_tokens == 1 and not tree:
        return [(first, stop, True)]
    context = config.tiles.context
    # With a tree mask a query token may not see those before it, only the context before all of
    # them.
    all_see = tile.origin if tree else tile.position + 1
    stretches = []
    low = first
    if config.options.sliding_window is not None:
        # From the begin of the last token's window on, every token of the tile sees all.
        last_begin = jnp.maximum(tile.position + tile.count - config.options.sliding_window, 0)
        low = jnp.clip(pl.cdiv(last_begin, context), first, stop)
        stretches = [(first, low, True)]
    high = jnp.clip(all_see // context, low, stop)
    return [*stretches, (low, high, False), (high, stop, True)]


def _place(table_ref, row, position_C, needed_C, block_size):  # type: ignore[no-untyped-def]
    """Returns the block and the slot of each position.

    Block sizes are powers of two, and shifts are cheaper than a signed division.
    """
    at = table_ref.at[row, position_C >> (block_size.bit_length() - 1)]
    block_C = tb.load(at) if needed_C is None else tb.load(at, mask=needed_C, other=0)
    return block_C, position_C & (block_size - 1)


def _read(pages_ref, place, kv_head, columns: Columns, needed_C, dtype):  # type: ignore[no-untyped-def]
    """Reads keys or values of one head in the given type, without their scales.

    Positions that are not needed give zeros.
    """
    block_C, slot_C = place
    at = pages_ref.at[block_C[:, None], slot_C[:, None], kv_head, columns.column_H[None, :]]
    mask = None if needed_C is None else needed_C[:, None]
    if columns.masked:
        inside = columns.inside_H[None, :]
        mask = inside if mask is None else mask & inside
    other = (
        0.0 if jnp.issubdtype(pages_ref.dtype, jnp.floating) else 0
    )  # Triton makes no float8 constant from an integer
    if mask is None:
        x_CH = tb.load(at)
    else:
        x_CH = tb.load(
            at, mask=jnp.broadcast_to(mask, (len(block_C), len(columns.at_H))), other=other
        )
    if pages_ref.dtype == jnp.uint8:
        x_CH = lax.bitcast_convert_type(x_CH, jnp.float8_e4m3fn)
    return x_CH.astype(dtype)


def _read_scale(scale_ref, place, kv_head, needed_C):  # type: ignore[no-untyped-def]
    if scale_ref is None:
        return None
    at = scale_ref.at[place[0], place[1], kv_head]
    return tb.load(at) if needed_C is None else tb.load(at, mask=needed_C, other=0.0)


def _factor(config: Config) -> float:
    """Returns the factor from scores, as the loop keeps them, to exponents of two.

    It is above zero, so that a maximum stays one.
    """
    return LOG2_E * (
        config.options.scale
        if config.options.logit_softcap is None and config.options.scale > 0
        else 1.0
    )


def _scores(scores_AC: jax.Array, k_scale_C: jax.Array | None, config: Config) -> jax.Array:
    """Turns products of queries and keys into scores.

    The attention scale is left to `_factor` if possible.
    """
    if k_scale_C is not None:
        scores_AC = scores_AC * k_scale_C[None, :]
    if config.options.logit_softcap is not None:
        return config.options.logit_softcap * jnp.tanh(
            scores_AC * (config.options.scale / config.options.logit_softcap)
        )
    return scores_AC if config.options.scale > 0 else scores_AC * config.options.scale


def _find_visible(tile: Tile, lanes: Lanes, position_C, tree_ref, config: Config):  # type: ignore[no-untyped-def]
    """Returns which of the positions each lane sees."""
    query_A = tile.position + lanes.token_A
    if tree_ref is None:
        seen_AC = position_C[None, :] <= query_A[:, None]
    else:
        index_C = position_C - tile.origin  # the place among the query tokens of the row
        branch_AC = _branch(tree_ref, tile, lanes, index_C, config.tiles.context)
        seen_AC = branch_AC | (index_C < 0)[None, :]
    if config.options.sliding_window is not None:
        seen_AC &= position_C[None, :] > query_A[:, None] - config.options.sliding_window
    return seen_AC


def _branch(tree_ref, tile: Tile, lanes: Lanes, index_C, context: int):  # type: ignore[no-untyped-def]
    """Returns the tree mask at those places.

    A lane reads the few words that hold its bits, since a gather of bits would fill the registers.
    """
    word_C = index_C >> 5
    first_word = jnp.min(word_C)
    words_AC = jnp.zeros((lanes.token_A.shape[0], context), jnp.int32)
    # A turn may begin within a word, so that its bits reach into one word more.
    for index in range(pl.cdiv(context, 32) + 1):
        word = first_word + index
        # Positions before the row's query tokens have words below 0.
        inside_A = lanes.used_A & (word >= 0) & (word < tree_ref.shape[1])
        bits_A = tb.load(tree_ref.at[tile.token + lanes.token_A, word], mask=inside_A, other=0)
        words_AC = jnp.where((word_C == word)[None, :], bits_A[:, None], words_AC)
    return ((words_AC >> (index_C & 31)[None, :]) & 1) != 0
