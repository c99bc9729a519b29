"""Asserts what must hold of block tables, pools and index between two steps.

Tests call this after every step. A server never does, because it walks all tables.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

from jaxpage.memory.block_pool import NULL_BLOCK, BlockPool
from jaxpage.memory.prefix_index import PrefixIndex

Tables = Mapping[int, list[int]]  # the key is a sequence id


def check_references(pool: BlockPool, tables: Tables) -> None:
    """Asserts that a pool is whole, and that its reference counts are the entries of the tables."""
    pool.check()
    entries = Counter(block for table in tables.values() for block in table if block != NULL_BLOCK)
    counts = {block: pool.ref_count(block) for block in range(pool.num_blocks)}
    counted = Counter({block: count for block, count in counts.items() if count})
    assert entries == counted, "references and tables differ"


def check_table(table: list[int], *, slides: bool) -> None:
    """Asserts that a table has no block twice, and the null block only where it may be.

    Args:
        table: The blocks of a sequence.
        slides: True in a group with a sliding window, whose tables may begin with null blocks.
    """
    num_passed = table.count(NULL_BLOCK)
    assert slides or not num_passed, "the null block is in a table"
    assert table[:num_passed] == [NULL_BLOCK] * num_passed, "a table has a hole"
    assert len(set(table[num_passed:])) == len(table) - num_passed, "a block is in a table twice"


def check_cached(
    pool: BlockPool,
    index: PrefixIndex | None,
    cached: Tables,
    *,
    slides: bool,
) -> None:
    """Asserts that the kept blocks are those of the index, and the cached ones of a table a chain.

    A chain is evicted from its tail. This does not hold where a window slides: there heads are
    given up before tails, and the eviction of a block takes the blocks after it along.

    Args:
        pool: The pool of the blocks.
        index: The prefix index; None without prefix caching.
        cached: The leading blocks of each sequence that were offered to the index.
        slides: True in a group with a sliding window.
    """
    kept_blocks = {block for block in range(pool.num_blocks) if pool.is_kept(block)}
    if index is None:
        assert not kept_blocks, "blocks are kept without an index"
        return
    index.check()
    is_kept_in_index = all(block in index for block in kept_blocks)
    assert len(index) == len(kept_blocks) and is_kept_in_index, "kept blocks are those of the index"
    for table in cached.values():
        assert slides or kept_blocks.issuperset(table), "a cached block is not kept"
        for before, block in itertools.pairwise(table):
            if block in index and before != NULL_BLOCK:
                assert index.entry(block).parent == before, "cached blocks are no chain"
    evicted: set[int] = set()
    for block in pool.cached_blocks():
        is_last = index.entry(block).parent not in evicted
        assert slides or is_last, f"block {block} would outlive the block before it"
        evicted.add(block)
