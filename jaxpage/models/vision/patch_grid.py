"""Computes on the host where the patches of a picture are: in its rows, windows and tables.

The processor gives patches in blocks, so that the m x m patches of a block follow each other and
become one token of the text model. With m = 2, a picture of 4 x 6 patches is

     0  1 |  4  5 |  8  9
     2  3 |  6  7 | 10 11
    ------+-------+------
    12 13 | 16 17 | 20 21
    14 15 | 18 19 | 22 23
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Integers = np.typing.NDArray[np.int32]
Floats = np.typing.NDArray[np.float32]


class PatchGrid(NamedTuple):
    """Describes the patches of one picture.

    Attributes:
        height: The number of rows of patches.
        width: The number of columns of patches.
        merge: The number of patches of a block, along each side.
    """

    height: int
    width: int
    merge: int

    @property
    def num_patches(self) -> int:
        """Returns the number of patches."""
        return self.height * self.width

    @property
    def num_blocks(self) -> int:
        """Returns the number of blocks, which is that of the text model's tokens."""
        return self.num_patches // self.merge**2

    def places(self) -> Integers:
        """Returns the row and the column of each patch [2, P], in the processor's order."""
        places = np.indices((self.height, self.width), np.int32)
        blocks = places.reshape(2, self.height // self.merge, self.merge, -1, self.merge)
        return blocks.swapaxes(2, 3).reshape(2, -1)

    def block_places(self) -> Integers:
        """Returns the row and the column of each block [2, R]."""
        shape = (self.height // self.merge, self.width // self.merge)
        return np.indices(shape, np.int32).reshape(2, -1)

    def windows(self, side: int) -> tuple[Integers, Integers]:
        """Returns the blocks in the order of windows, and the number of the window of each.

        Args:
            side: The number of blocks of a window along each side; those at the right and at the
                bottom may be smaller.
        """
        row_R, column_R = self.block_places()
        per_row = -(-(self.width // self.merge) // side)
        window_R = row_R // side * per_row + column_R // side
        order_R = np.argsort(window_R, kind="stable").astype(np.int32)
        return order_R, window_R[order_R]

    def interpolate(self, side: int) -> tuple[Integers, Floats]:
        """Returns the entries of a table of positions that each patch takes, and their shares.

        The table has side x side entries, whose corners are those of the picture. Each patch takes
        the four entries next to it [P, 4].
        """
        row_P, column_P = self.places()
        row_P2, row_share_P2 = _two_entries(row_P, self.height, side)
        column_P2, column_share_P2 = _two_entries(column_P, self.width, side)
        entry_P4 = (row_P2[:, :, None] * side + column_P2[:, None, :]).reshape(-1, 4)
        share_P4 = (row_share_P2[:, :, None] * column_share_P2[:, None, :]).reshape(-1, 4)
        return entry_P4, share_P4


def _two_entries(index_P: Integers, size: int, side: int) -> tuple[Integers, Floats]:
    """Returns the two entries [P, 2] of an axis of the table next to each place, and their shares.

    The arithmetic is that of transformers, in float32.
    """
    exact_P = index_P.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    entry_P2 = np.floor(exact_P)[:, None] + np.arange(2, dtype=np.float32)
    share_P2 = np.maximum(1 - np.abs(exact_P[:, None] - entry_P2), 0)
    # An entry behind the last one has a share of 0, but its index must be valid.
    return np.minimum(entry_P2, side - 1).astype(np.int32), share_P2


def rotary_positions(
    token_ids: np.typing.ArrayLike, placeholder: int, grids: Sequence[PatchGrid]
) -> Integers:
    """Returns the positions of a prompt's tokens on three axes [3, T]: time, height and width.

    Those of a text are the same on all axes. A picture begins at the position p that a token of
    text would have: the token of its block (r, c) is at (p, p + r, p + c), and what follows is
    after the largest of them.

    Args:
        token_ids: The prompt, which has the placeholder for each token of a picture.
        placeholder: The token that stands for those of pictures.
        grids: The pictures, in the order of the prompt.

    Raises:
        ValueError: The placeholders are not those of the pictures.
    """
    ids = np.asarray(token_ids)
    index_P = np.flatnonzero(ids == placeholder)
    num_blocks = sum(grid.num_blocks for grid in grids)
    if len(index_P) != num_blocks:
        raise ValueError(
            f"the prompt has {len(index_P)} tokens for pictures, and its {len(grids)} pictures "
            f"fill {num_blocks}"
        )
    step_T = np.ones(len(ids), np.int32)
    offset_3T = np.zeros((3, len(ids)), np.int32)
    first = 0
    for grid in grids:
        start, last = index_P[[first, first + grid.num_blocks - 1]]
        first += grid.num_blocks
        if last - start + 1 != grid.num_blocks:
            raise ValueError(
                f"the {grid.num_blocks} tokens of a picture, from position {start} on, do not "
                "follow each other"
            )
        row_column_2R = grid.block_places()
        step_T[start : last + 1] = 0
        # What follows begins after the longer side, which may leave a gap on the axis of the
        # shorter one.
        step_T[last] = max(grid.height, grid.width) // grid.merge
        offset_3T[1:, start : last + 1] = row_column_2R
    begin_T = np.cumsum(step_T, dtype=np.int32) - step_T
    return begin_T + offset_3T
