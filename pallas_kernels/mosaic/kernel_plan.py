"""The static plan of the Mosaic kernel, and the names of its arrays in global and in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_options import AttentionOptions

ROWS = 64  # query rows of a warpgroup: wgmma's M
NO_TOP = -1e30  # finite, so that exp2(-inf - top) is 0 in rows that have seen nothing yet
TREE_WORDS = 2  # of 32 bits: a tree has at most 64 query tokens
# columns of a tile's description; `_describe` in sets/mosaic.py says more
ROW, FIRST, LAST = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything static about a kernel.

    used_rows: query rows that are copied in and out; with several consumers all of them.
    """

    consumers: int
    used_rows: int
    context: int  # positions of a turn, a multiple of block_size or a part of it
    stages: int
    num_tiles: int
    splits: int
    split_turns: int  # turns of a split, at least
    group: int
    head_width: int
    block_size: int
    table_width: int
    dtype: Any
    options: AttentionOptions  # without arrays
    tree: bool
    sinks: bool
    interpret: bool

    @property
    def copy_slots(self) -> int:
        """Returns the slots of a block that one copy brings."""
        return min(self.context, self.block_size)

    @property
    def copies(self) -> int:
        """Returns the copies of a turn: one for each of its blocks, or for a part of one."""
        return self.context // self.copy_slots

    @property
    def rows_each(self) -> int:
        return min(ROWS, self.used_rows)

    @property
    def consumer_registers(self) -> int:
        """Returns the registers of a consumer's thread."""
        return 224 if self.head_width <= 128 else 232

    @property
    def producer_registers(self) -> int:
        """Returns the registers of a producer's thread.

        With two consumers they are what remains of the 504 that threads of all warpgroups can have together.
        """
        return 504 - 2 * self.consumer_registers if self.consumers == 2 else 96

    @property
    def shared_bytes(self) -> int:
        """Returns the shared memory of a program, without barriers and what Mosaic needs for itself."""
        queries, buffers = (
            self.consumers * ROWS * self.head_width * 2,
            4 * self.stages * self.context * self.head_width,
        )
        partials = self.consumers * ROWS * 4 * (self.head_width + 2) if self.splits > 1 else 0
        return queries + buffers + partials


class Operands(NamedTuple):
    """The arrays in global memory. X: used rows."""

    q: Any  # [R, K, X, H]
    k_pages: Any  # [P, S, K, H]
    v_pages: Any
    table: Any  # [B, M]
    tiles: Any  # [R, 3] int32
    tree: Any  # [R, TREE_WORDS, rows] int32, or None
    sinks: Any  # [K, rows] float32, in powers of two, or None
    out: Any  # [R, K, X, H]; with splits [R, splits, K, X, H] in float32, neither divided
    top_total: (
        # None; with splits [R, splits, K, 2, rows] in float32: highest score (in powers of two),
        # total weight
        Any
    )


class Shared(NamedTuple):
    """The arrays in shared memory. Barriers are arrays of one for each buffer, or for each consumer."""

    q: Any
    k: Any
    v: Any
    out: Any
    top_total: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    taking_turns: Any


class Turns(NamedTuple):
    """The turns of this program: `number` from `begin`, which counts turns from position 0."""

    begin: jax.Array
    number: jax.Array


def turns_per_split(plan: Plan, turns: Any) -> Any:
    """Returns the turns of a split of a tile that has so many turns.

    The tile's own context alone decides, so that a token's sums do not depend on its neighbours.
    """
    return jnp.maximum(plan.split_turns, lax.div(turns + (plan.splits - 1), jnp.int32(plan.splits)))
