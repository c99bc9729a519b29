"""Binds recurrent layers to their pages.

The seam `recur` writes the inputs of new tokens, then updates states through the block tables. A
slot holds the input of its token, as a slot of keys and values does. A block holds the state after
the last of its tokens that was computed, with the number of tokens that the state has seen:

    inputs    [ x0 x1 x2 x3 ] [ x4 x5 x6 .. ]     blocks of 4 slots
    states    [ after x3: 4 ] [ after x6: 7 ]

A row goes on from the state in the block of the token before it if that state has seen exactly the
tokens before the row. Otherwise (drafts were rejected, or a token is computed again) it begins with
the state of the block before, which is full, and updates it with the inputs that its own block
holds: a row from position 6 begins with the state after x3, and updates it with x4 and x5. So it
does not matter what a step has written after a row's tokens, and copying, swapping or finding
blocks is all that a fork, a preemption or a prefix hit needs.

Each state is updated token by token in one order, however the tokens are divided into steps, so the
bits are the same. A layer without a state, which is a convolution alone, computes all tokens at
once from the inputs in the slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpage.device.inputs.step_inputs import StepInputs
from jaxpage.device.pages.kv_pages import StatePages
from jaxpage.layers.context import Recur, Recurrence


class _Rows(NamedTuple):
    """Holds the rows of a step.

    Attributes:
        table_BM: The block tables.
        first_B: The first position that is computed anew.
        stop_B: The position after the last one that is computed.
        start_B: The place of the first position in the stream.
    """

    table_BM: jax.Array
    first_B: jax.Array
    stop_B: jax.Array
    start_B: jax.Array


def make_recur(inputs: StepInputs, *, layer_groups: tuple[int, ...], by_row: bool) -> Recur:
    """Returns the function `recur` for the recurrent layers of one step.

    Args:
        inputs: The step's inputs.
        layer_groups: The cache group of each layer.
        by_row: Computes one row after the other, in shapes that do not depend on their number;
            otherwise all rows at once.
    """

    @jax.named_scope("recurrence")
    def recur(
        layer_index: int, x_TE: jax.Array, recurrence: Recurrence, layer_pages: StatePages, /
    ) -> tuple[jax.Array, StatePages]:
        group = layer_groups[layer_index]
        length_B = jnp.diff(inputs.query_start)
        rows = _Rows(
            inputs.block_table_ZBM[group],
            first_B=jnp.where(length_B > 0, inputs.context_len_B - length_B, 0),
            stop_B=jnp.where(length_B > 0, inputs.context_len_B, 0),
            start_B=inputs.query_start[:-1],
        )
        pages = _write(layer_pages, x_TE, inputs.slots_ZT[group])
        if recurrence.update is None:
            return _convolve(rows, inputs.positions_T, pages, recurrence), pages
        out_TO = jnp.zeros((x_TE.shape[0], _out_width(recurrence, x_TE)), jnp.float32)
        if not by_row:
            return _update(rows, out_TO, pages, recurrence)

        def run_row(
            row: jax.Array, carry: tuple[jax.Array, StatePages]
        ) -> tuple[jax.Array, StatePages]:
            row_inputs = jax.tree.map(
                lambda of_rows: jax.lax.dynamic_slice_in_dim(of_rows, row, 1), rows
            )
            return _update(row_inputs, *carry, recurrence)

        # Rows of padding come last.
        num_rows = jnp.max(jnp.where(length_B > 0, 1 + jnp.arange(len(length_B)), 0))
        return jax.lax.fori_loop(0, num_rows, run_row, (out_TO, pages))

    return recur


def _out_width(recurrence: Recurrence, x_TE: jax.Array) -> int:
    state = recurrence.state
    update = recurrence.update
    assert update is not None and state.shape is not None
    states = jax.ShapeDtypeStruct((1, *state.shape), jnp.float32)
    inputs = jax.ShapeDtypeStruct((1, 1 + state.lookback, state.input_width), x_TE.dtype)
    _, out = jax.eval_shape(
        lambda states, inputs: update(states, recurrence.prepare(inputs)), states, inputs
    )
    return int(out.shape[1])


def _write(pages: StatePages, x_TE: jax.Array, slots_T: jax.Array) -> StatePages:
    block_size = pages.inputs.shape[1]
    place = slots_T // block_size, slots_T % block_size
    written = pages.inputs.at[place].set(
        x_TE.astype(pages.inputs.dtype), mode="drop", wrap_negative_indices=False
    )
    return pages._replace(inputs=written)


def _convolve(
    rows: _Rows, positions_T: jax.Array, pages: StatePages, recurrence: Recurrence
) -> jax.Array:
    """Returns the outputs of a layer without a state, of all tokens at once.

    It has no sums but those over a token's last inputs, whose order is always the same.
    """
    token_T = jnp.arange(len(positions_T))
    # Padding takes the last row, of whose table any block will do.
    row_T = jnp.searchsorted(rows.start_B, token_T, side="right", method="compare_all") - 1
    lookback = recurrence.state.lookback
    inputs_TWE = _last_inputs(pages.inputs, rows.table_BM, positions_T, lookback, row_T)
    prepared_inputs: jax.Array = recurrence.prepare(inputs_TWE)
    return prepared_inputs


def _update(
    rows: _Rows, out_TO: jax.Array, pages: StatePages, recurrence: Recurrence
) -> tuple[jax.Array, StatePages]:
    """Returns `out_TO` with the outputs of the rows' tokens, and the pages with their states.

    It goes block by block, and in each token by token. The inputs of a token's update are prepared
    in the turn before: XLA on CPU would compute them anew for each number of the state.
    """
    update = recurrence.update
    assert update is not None and pages.state is not None and pages.num_seen is not None
    block_size = pages.inputs.shape[1]
    num_tokens = out_TO.shape[0]
    is_one = len(rows.first_B) == 1  # then no turn of a loop belongs to another row
    begin_B = _begin(rows, pages)
    state = pages.state[_block_at(rows.table_BM, (begin_B - 1) // block_size)]
    state = jnp.where(_along(begin_B > 0, state), state, 0.0)
    num_blocks_B = jnp.where(
        rows.stop_B > rows.first_B, (rows.stop_B - 1) // block_size - begin_B // block_size + 1, 0
    )

    def in_block(
        index: jax.Array, carry: tuple[jax.Array, jax.Array, StatePages]
    ) -> tuple[jax.Array, jax.Array, StatePages]:
        state, out_TO, pages = carry
        number_B = begin_B // block_size + index
        from_B = jnp.maximum(begin_B, number_B * block_size)
        to_B = jnp.where(
            index < num_blocks_B, jnp.minimum(rows.stop_B, (number_B + 1) * block_size), from_B
        )

        def prepare(position_B: jax.Array) -> Any:
            return recurrence.prepare(
                _last_inputs(pages.inputs, rows.table_BM, position_B, recurrence.state.lookback)
            )

        def token(
            step: jax.Array, carry: tuple[jax.Array, jax.Array, Any]
        ) -> tuple[jax.Array, jax.Array, Any]:
            state, out_TO, ready = carry
            position_B = from_B + step
            # Also for rows without a token in this turn: their results are not selected below.
            new_state, out_BO = update(state, ready)
            is_there_B = position_B < to_B
            is_new_B = is_there_B & (position_B >= rows.first_B)
            index_B = jnp.where(is_new_B, rows.start_B + position_B - rows.first_B, num_tokens)
            state = new_state if is_one else jnp.where(_along(is_there_B, state), new_state, state)
            return state, out_TO.at[index_B].set(out_BO, mode="drop"), prepare(position_B + 1)

        carry = state, out_TO, prepare(from_B)
        state, out_TO, _ = jax.lax.fori_loop(0, jnp.max(to_B - from_B), token, carry)
        # A row without tokens in this turn writes to the null block.
        block_B = jnp.where(to_B > from_B, _block_at(rows.table_BM, number_B), 0)
        assert pages.state is not None and pages.num_seen is not None
        pages = pages._replace(
            state=pages.state.at[block_B].set(state), num_seen=pages.num_seen.at[block_B].set(to_B)
        )
        return state, out_TO, pages

    _, out_TO, pages = jax.lax.fori_loop(0, jnp.max(num_blocks_B), in_block, (state, out_TO, pages))
    return out_TO, pages


def _begin(rows: _Rows, pages: StatePages) -> jax.Array:
    """Returns the position of each row's first update; there is a state for all before it."""
    assert pages.num_seen is not None
    block_size = pages.inputs.shape[1]
    # From position 0 on there is no block before; any answer makes the result 0.
    num_seen_B = pages.num_seen[_block_at(rows.table_BM, (rows.first_B - 1) // block_size)]
    return jnp.where(
        num_seen_B == rows.first_B, rows.first_B, rows.first_B // block_size * block_size
    )


def _last_inputs(
    inputs: jax.Array,
    table_BM: jax.Array,
    position_B: jax.Array,
    lookback: int,
    row_B: jax.Array | None = None,
) -> jax.Array:
    """Returns the inputs [B, 1 + lookback, E] up to each position, each of another row.

    Positions of the same row come with the row of each (`row_B`).
    """
    block_size = inputs.shape[1]
    position_BW = position_B[:, None] + jnp.arange(-lookback, 1)
    index_BW = jnp.clip(position_BW // block_size, 0, table_BM.shape[1] - 1)
    if row_B is None:
        block_BW = jnp.take_along_axis(table_BM, index_BW, axis=1)
    else:
        block_BW = table_BM[row_B[:, None], index_BW]
    last_inputs = inputs[block_BW, position_BW % block_size]
    return jnp.where((position_BW >= 0)[..., None], last_inputs, 0)


def _block_at(table_BM: jax.Array, index_B: jax.Array) -> jax.Array:
    """Returns the block at a place of each row's table; the place is clamped to the table."""
    index_B1 = jnp.clip(index_B, 0, table_BM.shape[1] - 1)[:, None]
    return jnp.take_along_axis(table_BM, index_B1, axis=1)[:, 0]


def _along(mask_B: jax.Array, array: jax.Array) -> jax.Array:
    return mask_B.reshape(-1, *(1,) * (array.ndim - 1))
