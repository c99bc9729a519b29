"""Computes paged attention on Hopper with a Mosaic GPU kernel.

A program takes a tile of query rows, one key/value head and one split of the context. Its
warpgroups are specialised. The last one, the producer, asks the TMA for the blocks of a turn by
their ids, as long as a buffer is free. Each of the others, a consumer, holds 64 query rows: it
computes scores by wgmma, the softmax in registers, and weights times values by wgmma with the
weights in registers. Two consumers take turns: while one has the tensor cores, the other computes
its softmax.

    producer   table -> ids -> K blocks -> V blocks       k_full, v_full: TMA -> consumers
    consumer   wait K, scores, (mask), softmax,           k_free, v_free: consumers -> producer
               wait V, (clean V), sum

Only turns that cross an edge of what the tile sees pay for masks. In turns that hold masked
positions, the first consumer overwrites their values with zeros in shared memory: they may be NaN,
and zero times NaN is NaN. Their keys do no harm, since the mask replaces any score.

The interpreter has no accumulator that starts from a value and no product with its left side in
registers, and does not look for races in products. Only `_add_matmul` does something else for it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic.jax_versions import load, mg, transpose
from pallas_kernels.mosaic.kernel_plan import (
    FIRST,
    LAST,
    NO_TOP,
    ROW,
    ROWS,
    TREE_WORDS,
    Operands,
    Plan,
    Shared,
    Turns,
    turns_per_split,
)

_LOG2E = math.log2(math.e)
_SWIZZLED = (
    mg.TilingTransform((8, 64)),
    mg.SwizzleTransform(128),
)  # for elements of 2 bytes; TMA, wgmma and registers all use this layout
_SWIZZLED_F32 = (mg.TilingTransform((8, 32)), mg.SwizzleTransform(128))


def entry(plan: Plan, operands: Operands) -> None:
    """Runs the kernel's body in every warpgroup."""
    keys = mg.SMEM((plan.stages, plan.context, plan.head_dim), plan.dtype, transforms=_SWIZZLED)
    queries = mg.SMEM((plan.consumers, ROWS, plan.head_dim), plan.dtype, transforms=_SWIZZLED)
    partial = top_total = None
    if plan.splits > 1:
        partial = mg.SMEM(
            (plan.consumers, ROWS, plan.head_dim), jnp.float32, transforms=_SWIZZLED_F32
        )
        top_total = mg.SMEM((plan.consumers, 2, ROWS), jnp.float32)
    filled = mg.Barrier(num_arrivals=plan.copies, num_barriers=plan.stages)
    freed = mg.Barrier(num_arrivals=plan.consumers, num_barriers=plan.stages)
    # These only describe memory: `run_scoped` gives each field its own, so keys and values share
    # none.
    shared = Shared(
        q=queries,
        k=keys,
        v=keys,
        out=partial,
        top_total=top_total,
        q_full=mg.Barrier(num_barriers=plan.consumers),
        k_full=filled,
        v_full=filled,
        k_free=freed,
        v_free=freed,
        taking_turns=mg.Barrier(num_arrivals=2) if plan.consumers == 2 else None,
    )
    pl.run_scoped(
        lambda *scratch: _program(plan, operands, Shared(*scratch)),
        *shared,
        collective_axes="warpgroup",
    )


def _program(plan: Plan, operands: Operands, shared: Shared) -> None:
    # Later tiles of a row have more to read, so they start first.
    tile = plan.num_tiles - 1 - lax.axis_index("tile")
    head = lax.axis_index("head")
    split = lax.axis_index("split")
    warpgroup = lax.axis_index("warpgroup")
    turns = _turns(plan, operands.tiles, tile, split)

    @pl.when(turns.number > 0)
    def _() -> None:
        @pl.when(warpgroup == plan.consumers)
        def _() -> None:
            mg.set_max_registers(plan.producer_registers, action="decrease")
            _produce(plan, operands, shared, turns, operands.tiles[tile, ROW], head)

        @pl.when(warpgroup < plan.consumers)
        def _() -> None:
            mg.set_max_registers(plan.consumer_registers, action="increase")
            _consume(plan, operands, shared, turns, tile, head, split, warpgroup)


def _turns(plan: Plan, tiles: Any, tile: jax.Array, split: jax.Array) -> Turns:
    begin = lax.div(_first_seen(plan, tiles, tile), jnp.int32(plan.context))
    # A tile that sees nothing has LAST = -1.
    end = lax.div(tiles[tile, LAST] + plan.context, jnp.int32(plan.context))
    num_turns = turns_per_split(plan, end - begin)
    begin = begin + split * num_turns
    return Turns(begin, jnp.minimum(num_turns, end - begin))


def _first_seen(plan: Plan, tiles: Any, tile: jax.Array) -> jax.Array:
    """Returns the first position that any row of the tile sees."""
    if plan.options.sliding_window is None:
        return jnp.int32(0)
    return jnp.maximum(tiles[tile, FIRST] - (plan.options.sliding_window - 1), 0)


_IDS_AHEAD = 8  # so many block ids fit the producer's registers


def _produce(
    plan: Plan, operands: Operands, shared: Shared, turns: Turns, row: jax.Array, head: jax.Array
) -> None:
    def block_of(turn: jax.Array, copy: int) -> jax.Array:
        """Returns the block of a copy.

        After the end of the table it is the last entry: those positions are masked.
        """
        position = (turns.begin + turn) * plan.context + copy * plan.copy_slots
        return operands.table[
            row, jnp.minimum(lax.div(position, jnp.int32(plan.block_size)), plan.table_width - 1)
        ]

    def ids_of(turn: jax.Array) -> list[jax.Array]:
        return (
            [block_of(turn, copy) for copy in range(plan.copies)]
            if plan.copies <= _IDS_AHEAD
            else []
        )

    def body(turn: jax.Array, ids: list[jax.Array]) -> list[jax.Array]:
        slot = lax.rem(turn, jnp.int32(plan.stages))
        following = ids_of(turn + 1)  # read long before they are needed
        start: Any = 0  # the first slot in the block
        if plan.context < plan.block_size:
            start = lax.rem((turns.begin + turn) * plan.context, jnp.int32(plan.block_size))
            # Mosaic has to know it: tiles of shared memory have 8 rows.
            start = pl.multiple_of(start, 8)
        for pages, buffer, full, free in (
            (operands.k_pages, shared.k, shared.k_full, shared.k_free),
            (operands.v_pages, shared.v, shared.v_full, shared.v_free),
        ):

            @pl.when(turn >= plan.stages)
            def _(free: Any = free) -> None:
                mg.barrier_wait(free.at[slot])

            for copy in range(plan.copies):
                block = ids[copy] if ids else block_of(turn, copy)
                place = buffer.at[slot, pl.ds(copy * plan.copy_slots, plan.copy_slots)]
                mg.copy_gmem_to_smem(
                    pages.at[block, pl.ds(start, plan.copy_slots), head], place, full.at[slot]
                )
        return following

    lax.fori_loop(0, turns.number, body, ids_of(jnp.int32(0)))
    # The interpreter insists that a thread that waits at a barrier waits for all of its phases.
    for slot in range(plan.stages):

        @pl.when(slot < turns.number)
        def _(slot: int = slot) -> None:
            mg.barrier_wait(shared.k_free.at[slot])
            mg.barrier_wait(shared.v_free.at[slot])


def _consume(
    plan: Plan,
    operands: Operands,
    shared: Shared,
    turns: Turns,
    tile: jax.Array,
    head: jax.Array,
    split: jax.Array,
    consumer: jax.Array,
) -> None:
    used = pl.ds(consumer * ROWS, plan.rows_each)
    q = shared.q.at[consumer]
    mg.copy_gmem_to_smem(
        operands.q.at[tile, head, used], q.at[pl.ds(0, plan.rows_each)], shared.q_full.at[consumer]
    )
    mg.barrier_wait(shared.q_full.at[consumer])
    first = operands.tiles[tile, FIRST]
    last = operands.tiles[tile, LAST]
    first_seen = _first_seen(plan, operands.tiles, tile)
    words = _tree_words(plan, operands, tile, consumer)
    folded = (
        plan.options.logit_softcap is None and plan.options.scale > 0
    )  # then the factor of the scores goes into their exponent
    factor = plan.options.scale * _LOG2E if folded else 1.0

    def body(
        turn: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        acc, top, total = carry
        slot = lax.rem(turn, jnp.int32(plan.stages))
        position = (turns.begin + turn) * plan.context  # the position of the turn's first key
        end = position + plan.context
        mg.barrier_wait(shared.k_full.at[slot])

        def scores_of(matmul: Any) -> jax.Array:
            mg.wgmma(matmul, q, transpose(shared.k.at[slot]))
            _hand_over(plan, shared)
            return matmul[...]

        scores = pl.run_scoped(scores_of, mg.ACC((ROWS, plan.context), jnp.float32))
        mg.barrier_arrive(shared.k_free.at[slot])
        if not folded:
            scores = _scale(plan, scores)
        # The first token's own position needs no mask in causal order, but a bit of a tree's mask.
        edge = end > first + (0 if plan.tree else 1)
        if plan.options.sliding_window is not None:
            edge |= position <= last - plan.options.sliding_window
        scores = lax.cond(
            edge,
            lambda scores: _mask(plan, scores, position, first, words, consumer),
            lambda s: s,
            scores,
        )
        new_top = jnp.maximum(top, scores.max(axis=1) * factor)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        decay = jnp.exp2(top - new_top)
        total = total * decay + weights.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        low = weights.astype(plan.dtype)
        acc, total, new_top, low = lax.optimization_barrier((acc, total, new_top, low))
        mg.barrier_wait(shared.v_full.at[slot])
        unseen = (end > last + 1) | (position < first_seen)

        @pl.when(unseen)
        def _() -> None:
            _clean(plan, shared, slot, position, first_seen, last, consumer)

        _hand_over(plan, shared)
        acc = _add_matmul(plan, acc, low, shared.v.at[slot])
        mg.barrier_arrive(shared.v_free.at[slot])
        return acc, new_top, total

    if plan.consumers == 2:
        pl.when(consumer == 1)(lambda: _hand_over(plan, shared))
    start = (
        _full((ROWS, plan.head_dim), 0.0),
        *_softmax_start(plan, operands, head, split, consumer),
    )
    acc, top, total = lax.fori_loop(0, turns.number, body, start)
    if plan.consumers == 2:
        pl.when(consumer == 0)(lambda: _hand_over(plan, shared))
    if plan.splits == 1:
        inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)  # a row that sees nothing gives zeros
        # Nobody reads the queries any more, so their buffer takes the result to global memory.
        q[...] = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(plan.dtype)
        mg.commit_smem()
        mg.copy_smem_to_gmem(q.at[pl.ds(0, plan.rows_each)], operands.out.at[tile, head, used])
    else:
        shared.out.at[consumer][...] = acc
        shared.top_total.at[consumer, 0][...] = top
        shared.top_total.at[consumer, 1][...] = total
        mg.commit_smem()
        place = operands.out.at[tile, split, head, used]
        mg.copy_smem_to_gmem(shared.out.at[consumer, pl.ds(0, plan.rows_each)], place)
        mg.copy_smem_to_gmem(
            shared.top_total.at[consumer],
            operands.top_total.at[tile, split, head, :, pl.ds(consumer * ROWS, ROWS)],
        )
    mg.wait_smem_to_gmem(0)


def _softmax_start(
    plan: Plan, operands: Operands, head: jax.Array, split: jax.Array, consumer: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the highest score and the total weight before the first turn.

    The sinks are in those of the first split.
    """
    if not plan.sinks:
        return _full((ROWS,), NO_TOP), _full((ROWS,), 0.0)
    layout = mg.Layout.WGMMA.reduce(1)
    sinks = load(operands.sinks.at[head, pl.ds(consumer * ROWS, ROWS)], layout, optimized=False)
    first = (split == 0).astype(jnp.float32)
    return jnp.where(split == 0, sinks, _full((ROWS,), NO_TOP)), _full((ROWS,), 1.0) * first


def _full(shape: tuple[int, ...], value: float) -> jax.Array:
    layout = mg.Layout.WGMMA if len(shape) == 2 else mg.Layout.WGMMA.reduce(1)
    return mg.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return mg.broadcasted_iota(jnp.int32, shape, axis, layout=mg.Layout.WGMMA)


def _hand_over(plan: Plan, shared: Shared) -> None:
    """Lets both consumers meet.

    The second one starts one meeting later, so one does before a meeting what the other does after
    it.
    """
    if plan.consumers == 2:
        mg.barrier_arrive(shared.taking_turns)
        mg.barrier_wait(shared.taking_turns)


def _scale(plan: Plan, matmuls: jax.Array) -> jax.Array:
    """Returns scores as exponents of two."""
    if plan.options.logit_softcap is None:
        return matmuls * (plan.options.scale * _LOG2E)
    # tanh(x) = 1 - 2 / (1 + exp(2x)). The quotient is the square of a root, since the GPU's own
    # tanh has only 11 bits.
    root = lax.rsqrt(
        1.0 + jnp.exp2(matmuls * (2 * _LOG2E * plan.options.scale / plan.options.logit_softcap))
    )
    return (1.0 - 2.0 * (root * root)) * (plan.options.logit_softcap * _LOG2E)


def _tree_words(
    plan: Plan, operands: Operands, tile: jax.Array, consumer: jax.Array
) -> list[jax.Array]:
    """Returns the bits of each row that say which new tokens it sees."""
    if not plan.tree:
        return []
    rows = pl.ds(consumer * ROWS, ROWS)
    layout = mg.Layout.WGMMA.reduce(1)
    return [
        load(operands.tree.at[tile, i, rows], layout, optimized=False) for i in range(TREE_WORDS)
    ]


def _mask(
    plan: Plan,
    scores: jax.Array,
    position: jax.Array,
    first: jax.Array,
    words: list[jax.Array],
    consumer: jax.Array,
) -> jax.Array:
    key = _iota(scores.shape, 1) + position
    if plan.tree:
        place = key - first
        low, high = (lax.broadcast_in_dim(word, scores.shape, [0]) for word in words)
        bits = lax.shift_right_logical(jnp.where(place < 32, low, high), place & 31)
        return jnp.where(
            (place < 0) | ((place < 32 * TREE_WORDS) & ((bits & 1) == 1)), scores, -jnp.inf
        )
    # G rows of a tile are the heads of one token.
    query = lax.div(_iota(scores.shape, 0) + consumer * ROWS, jnp.int32(plan.group)) + first
    seen = key <= query
    if plan.options.sliding_window is not None:
        seen &= key > query - plan.options.sliding_window
    return jnp.where(seen, scores, -jnp.inf)


def _clean(
    plan: Plan,
    shared: Shared,
    slot: jax.Array,
    position: jax.Array,
    first_seen: jax.Array,
    last: jax.Array,
    consumer: jax.Array,
) -> None:
    """Writes zeros over the masked values.

    The first consumer does it; the second reads them after their next meeting.
    """

    @pl.when(consumer == 0)
    def _() -> None:
        for row in range(0, plan.context, ROWS):
            key = _iota((ROWS, 64), 0) + (position + row)
            for column in range(0, plan.head_dim, 64):
                ref = shared.v.at[slot, pl.ds(row, ROWS), pl.ds(column, 64)]
                values = load(ref, mg.Layout.WGMMA)
                ref[...] = jnp.where(
                    (key >= first_seen) & (key <= last), values, jnp.zeros((), plan.dtype)
                )
        mg.commit_smem()


def _add_matmul(plan: Plan, acc: jax.Array, weights: jax.Array, v: Any) -> jax.Array:
    """Returns acc + weights @ v.

    The interpreter gets an ordinary product of what is read, because it checks reads for races.
    """
    if plan.interpret:
        values = v[...]
        mg.commit_smem()  # the interpreter wants it between a read and the TMA's next write
        return acc + jnp.dot(weights, values, preferred_element_type=jnp.float32)
    return pl.run_state(lambda acc: mg.wgmma(acc, weights, v))(mg.ACC.init(acc))
