"""Chooses how a product is cut into programs, for GPUs on which nothing was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jax.experimental import pallas as pl

PACKED = ("int4", "fp4")  # two codes in a byte
ROOMY = ((9, 0), (10, 0))  # compute capabilities whose programs may have 227 KiB of shared memory
PROGRAMS = 512  # these keep all of a GPU's processors reading: 132 of an H100, four each
MIN_TURNS = 4
MAX_SPLITS = 8
# The programs of a tile of rows, in a product whose sums do not depend on the number of rows.
PROGRAMS_OF_A_TILE = 256
# With more rows the partial sums would take more memory than the product is worth.
MAX_SEPARATE_ROWS = 256


@dataclass(frozen=True)
class Cut:
    """Says how a product is cut.

    The inputs are in `segments` runs of whole turns. The sums of segments are added up in order.

    Attributes:
        rows: The rows of a tile.
        cols: The outputs of a program.
        depth: The inputs of a turn.
        num_warps: The warps of a program.
        num_stages: The turns whose loads are in flight.
        splits: The programs that share the turns of a tile.
        folds: The segments of a program, which adds up their sums.
        is_ordered: True if the sums of splits are added up as a program adds up its segments.
    """

    rows: int
    cols: int
    depth: int
    num_warps: int
    num_stages: int
    splits: int = 1
    folds: int = 1
    is_ordered: bool = False

    @property
    def segments(self) -> int:
        """Returns the number of segments."""
        return self.splits * self.folds


def heuristic(
    x_shape: tuple[int, int], w_shape: tuple[int, int], dtype: str, code: str | None, *, roomy: bool
) -> Cut:
    """Returns the cut of a product for a GPU on which nothing was measured.

    It depends on shapes alone, so that the order of a row's sums does too.

    Args:
        x_shape: The rows and inputs.
        w_shape: The groups and outputs.
        dtype: The type of x.
        code: The code of the weights, or None.
        roomy: Says whether a program has 227 KiB of shared memory.
    """
    num_rows, num_in = x_shape
    num_groups, num_out = w_shape
    cut = _unsplit(num_rows / num_groups, dtype, code, roomy=roomy)
    programs = num_tiles(num_rows, num_groups, cut.rows) * pl.cdiv(num_out, cut.cols)
    splits = min(PROGRAMS // programs, num_in // (MIN_TURNS * cut.depth), MAX_SPLITS)
    return replace(cut, splits=max(1, splits))


def num_tiles(num_rows: int, num_groups: int, rows: int) -> int:
    """Returns the largest possible number of tiles."""
    # Each group that has rows may have one tile that is not full.
    return num_rows // rows + min(num_groups, num_rows)


def cut_by_weight(
    x_shape: tuple[int, int], w_shape: tuple[int, int], dtype: str, code: str | None, *, roomy: bool
) -> Cut:
    """Returns a cut in which the order of a row's sums depends on the weight of a group alone.

    The turns and the segments of the inputs are the same for one row as for a thousand. Few rows
    have a program for each segment. Many rows have enough programs without that, and each program
    goes through all segments. The rows of a tile and the warps may differ: a tensor core adds up 16
    inputs in one order for any of them, on top of the sum of those before.

    Args:
        x_shape: The rows and inputs.
        w_shape: The groups and outputs.
        dtype: The type of x.
        code: The code of the weights, or None.
        roomy: Says whether a program has 227 KiB of shared memory.
    """
    num_rows, num_in = x_shape
    num_groups, num_out = w_shape
    cut = _unsplit(num_rows / num_groups, dtype, code, roomy=roomy)
    if code in PACKED:  # a turn has first the low halves of its bytes, and then the high ones
        cut = replace(cut, depth=128)
    blocks = pl.cdiv(num_out, cut.cols)
    segments = 1
    while (
        2 * segments <= min(MAX_SPLITS, num_in // (MIN_TURNS * cut.depth))
        and 2 * segments * blocks <= PROGRAMS_OF_A_TILE
    ):
        segments *= 2
    programs = num_tiles(num_rows, num_groups, cut.rows) * blocks
    is_separate = num_rows <= MAX_SEPARATE_ROWS and programs < PROGRAMS
    ways = {"splits": segments} if is_separate else {"folds": segments}
    return replace(cut, **ways, is_ordered=True)


def _unsplit(average: float, dtype: str, code: str | None, *, roomy: bool) -> Cut:
    """Returns a cut without splits for this number of rows in a group."""
    rows = (
        16 if average <= 16 else 32 if average <= 32 else 64 if average <= 128 or not roomy else 128
    )
    warps = 8 if rows == 128 else 4
    stages = 4 if roomy else 3
    if dtype == "float32":  # without tensor cores, operands of products are in registers
        return Cut(min(rows, 32), 64, 32, 4, 2)
    if code is None:
        return Cut(rows, 128, 128 if dtype == "int8" else 64, warps, stages)
    return Cut(rows, 64, 256 if code in PACKED and rows == 16 else 128, warps, stages)
