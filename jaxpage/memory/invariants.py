"""What must hold of block tables, pools and index between steps: asserted after every step in tests, never in service."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

from jaxpage.memory.block_pool import NULL_BLOCK, BlockPool
from jaxpage.memory.prefix_index import PrefixIndex

Tables = Mapping[int, list[int]]  # by sequence id


def check_references(pool: BlockPool, tables: Tables) -> None:
    """The pool is whole, and its reference counts are exactly the entries of the tables."""
    pool.check()
    entries = Counter(block for table in tables.values() for block in table if block != NULL_BLOCK)
    counts = {block: pool.ref_count(block) for block in range(pool.num_blocks)}
    assert entries == Counter({block: count for block, count in counts.items() if count}), (
        "references and tables differ"
    )


def check_table(table: list[int], *, slides: bool) -> None:
    """No block twice; the null block only where a window slides, and only at the front."""
    num_passed = table.count(NULL_BLOCK)
    assert slides or not num_passed, "the null block is in a table"
    assert table[:num_passed] == [NULL_BLOCK] * num_passed, "a table has a hole"
    assert len(set(table[num_passed:])) == len(table) - num_passed, "a block is in a table twice"


def check_cached(pool: BlockPool, index: PrefixIndex | None, cached: Tables, *, slides: bool) -> None:
    """The kept blocks are those of the index; the cached blocks of a table are a chain, evicted from the tail.

    Where a window slides, heads are given up before tails, and an eviction takes along what is behind.
    """
    kept = {block for block in range(pool.num_blocks) if pool.is_kept(block)}
    if index is None:
        assert not kept, "blocks are kept without an index"
        return
    index.check()
    assert len(index) == len(kept) and all(block in index for block in kept), "kept blocks are those of the index"
    for table in cached.values():
        assert slides or kept.issuperset(table), "a cached block is not kept"
        for before, block in itertools.pairwise(table):
            if block in index and before != NULL_BLOCK:
                assert index.entry(block).parent == before, "cached blocks are no chain"
    evicted: set[int] = set()
    for block in pool.cached_blocks():
        assert slides or index.entry(block).parent not in evicted, f"block {block} would outlive the block before it"
        evicted.add(block)
