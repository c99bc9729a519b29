"""Says where a drafter begins to draft: after the token that was drawn for each row of a step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpage.device.drafters.drafter import TargetStep
from jaxpage.device.sampler import Draws, draws_of


class Ends(NamedTuple):
    """Describes the token that was drawn for each row."""

    row_B: Int[Array, "B"]  # the row of the step that it follows
    block_table_ZBM: Int[Array, "Z B M"]
    position_B: Int[Array, "B"]  # the position of that token
    token_id_B: Int[Array, "B"]
    draws: Draws  # the parameters that it was drawn with
    # The drafter's output for the token before it, if the drafter takes features.
    output_BD: Float[Array, "B D"] | None
    # What its rotary positions have more than its position, if these have several axes.
    offset_AB: Int[Array, "A B"] | None

    def axes(self, position_BX: Int[Array, "B X"]) -> Int[Array, "A T"] | None:
        """Returns the rotary positions of tokens after it; None if these have one axis."""
        if self.offset_AB is None:
            return None
        axes_ABX = position_BX + self.offset_AB[:, :, None]
        return axes_ABX.reshape(len(axes_ABX), -1)


def ends_of(target: TargetStep, output_TD: jax.Array | None) -> Ends:
    """Returns the ends of the rows for which drafts are wanted.

    Args:
        target: The step of the target.
        output_TD: The drafter's outputs for the tokens of the step, if it takes features.
    """
    inputs = target.inputs
    last_B = target.last_B
    draws = jax.tree.map(lambda array: array[last_B], draws_of(inputs))
    token_B = inputs.draws.drawn_token_R[last_B]
    row_B = jnp.searchsorted(inputs.query_start[1:], token_B, side="right", method="compare_all")
    axes_AT = inputs.rotary_AT
    return Ends(
        row_B,
        inputs.block_table_ZBM[:, row_B],
        draws.position_R,
        # A negative id says that nothing was drawn; drafts after it are never used.
        jnp.maximum(target.token_ids_R[last_B], 0),
        draws,
        None if output_TD is None else output_TD[token_B],
        # After a picture the text goes on from the same position on all axes.
        None if axes_AT is None else (axes_AT - inputs.positions_T)[:, token_B],
    )
