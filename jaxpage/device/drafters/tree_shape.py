"""Defines how deep and wide the trees of a draft model are."""

from __future__ import annotations

from typing import NamedTuple


class TreeShape(NamedTuple):
    """Holds the largest depth and width of a drafter's trees."""

    num_levels: int  # J: tokens ahead
    # X: the branches that go on from a level, and the candidates after each of them; 1: a chain
    num_branches: int
    max_rows: int  # a step with more rows has no drafts

    def scratch_blocks(self, block_size: int) -> int:
        """Returns the scratch blocks of one branch, which may begin anywhere in a block."""
        return -(-(block_size - 1 + self.num_levels) // block_size)

    def num_scratch_blocks(self, block_size: int) -> int:
        """Returns the scratch blocks of all branches of a step."""
        return self.max_rows * self.num_branches * self.scratch_blocks(block_size)
