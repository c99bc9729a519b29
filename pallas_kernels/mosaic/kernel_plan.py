"""Defines the static plan of the Mosaic kernel, and its arrays in global and in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_options import AttentionOptions

ROWS = 64  # the query rows of a warpgroup: wgmma's M
NO_TOP = -1e30  # finite, so that exp2(-inf - top) is 0 in rows that have seen nothing yet
TREE_WORDS = 2  # words of 32 bits: a tree has at most 64 query tokens
# The columns of a tile's description; `_describe` in sets/mosaic.py says more.
ROW, FIRST, LAST = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Holds everything static about a kernel.

    Attributes:
        consumers: The warpgroups that compute, one or two.
        used_rows: The query rows that are copied in and out; all of them with several consumers.
        context: The positions of a turn, a multiple of block_size or a part of it.
        stages: The turns whose blocks are in shared memory at a time.
        num_tiles: The tiles of query rows (R).
        splits: The splits of the context.
        split_turns: The turns of a split at least.
        group: The query heads for each key/value head (G).
        head_dim: The width of a head (H).
        block_size: The slots of a block (S).
        table_width: The blocks of a table row (M).
        dtype: The type of queries and pages.
        options: The options of attention, without arrays.
        tree: Says whether there is a tree mask.
        sinks: Says whether there are sinks.
        interpret: Says whether the kernel runs on CPU.
    """

    consumers: int
    used_rows: int
    context: int
    stages: int
    num_tiles: int
    splits: int
    split_turns: int
    group: int
    head_dim: int
    block_size: int
    table_width: int
    dtype: Any
    options: AttentionOptions
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
        """Returns the query rows that are copied for each consumer."""
        return min(ROWS, self.used_rows)

    @property
    def consumer_registers(self) -> int:
        """Returns the registers of a consumer's thread."""
        return 224 if self.head_dim <= 128 else 232

    @property
    def producer_registers(self) -> int:
        """Returns the registers of a producer's thread.

        The threads of all warpgroups can have 504 together; with two consumers the producer gets
        the rest.
        """
        return 504 - 2 * self.consumer_registers if self.consumers == 2 else 96

    @property
    def shared_bytes(self) -> int:
        """Returns the shared memory of a program, without barriers and Mosaic's own needs."""
        queries = self.consumers * ROWS * self.head_dim * 2
        # Keys and values, of two bytes each.
        buffers = 4 * self.stages * self.context * self.head_dim
        partials = self.consumers * ROWS * 4 * (self.head_dim + 2) if self.splits > 1 else 0
        return queries + buffers + partials


class Operands(NamedTuple):
    """Holds the arrays in global memory; X is the number of used rows."""

    q: Any  # [R, K, X, H]
    k_pages: Any  # [P, S, K, H]
    v_pages: Any
    table: Any  # [B, M]
    tiles: Any  # [R, 3] int32
    tree: Any  # [R, TREE_WORDS, rows] int32, or None
    sinks: Any  # [K, rows] float32 as exponents of two, or None
    out: Any  # [R, K, X, H]; with splits [R, splits, K, X, H] in float32, not yet divided
    top_total: (
        # None without splits; else [R, splits, K, 2, rows] in float32: the highest score, as an
        # exponent of two, and the total weight.
        Any
    )


class Shared(NamedTuple):
    """Holds the arrays in shared memory.

    Barriers are arrays of one barrier for each buffer, or for each consumer.
    """

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
    """Holds the turns of a program: `number` turns from `begin`, which counts from position 0."""

    begin: jax.Array
    number: jax.Array


def turns_per_split(plan: Plan, turns: Any) -> Any:
    """Returns the turns of a split, for a tile with so many turns.

    Only the tile's own context decides, so that a token's sums do not depend on its neighbours.
    """
    return jnp.maximum(plan.split_turns, lax.div(turns + (plan.splits - 1), jnp.int32(plan.splits)))
