"""The block tables: which physical blocks hold a sequence's positions, shared between sequences until one of them writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import KeysView, Mapping

from jaxpage.errors import CapacityError
from jaxpage.memory.block_pool import NULL_BLOCK, BlockPool
from jaxpage.memory.memory_split import MemorySplit, split_memory


class _Table:
    """A sequence's blocks in order of position, and the same as a tuple until it changes: plans take it every step."""

    __slots__ = ("blocks", "frozen")

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.frozen: tuple[int, ...] | None = None


class BlockManager:
    """Reserves, forks, trims and releases block tables over one pool.

    Position p of a sequence lives in slot p % block_size of block p // block_size of its table. A block that several tables
    refer to is read by all of them and written by none: `reserve` replaces it first (copy-on-write).
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        """Raises ValueError unless `block_size`, S, is positive."""
        if block_size < 1:
            raise ValueError(f"{block_size=} must be at least 1")
        self.pool = pool
        self.block_size = block_size
        self._tables: dict[int, _Table] = {}

    @property
    def sequence_ids(self) -> KeysView[int]:
        """The sequences that own blocks, or may: every one that was reserved for or forked, and not released."""
        return self._tables.keys()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_table(self, sequence_id: int) -> tuple[int, ...]:
        table = self._tables[sequence_id]
        if table.frozen is None:
            table.frozen = tuple(table.blocks)
        return table.frozen

    def num_new_blocks(self, sequence_id: int, start: int, stop: int) -> int:
        """Free blocks that `reserve` would take: for growth, and to replace shared blocks in the written range."""
        table = self._tables.get(sequence_id)
        if table is None:
            return self.blocks_for(stop)
        blocks, ref_count = table.blocks, self.pool.ref_count
        first, last = start // self.block_size, (stop - 1) // self.block_size
        if last >= len(blocks):
            return last + 1 - len(blocks) + sum(ref_count(block) > 1 for block in blocks[first:])
        if first == last:  # a decoding sequence, every step
            return int(ref_count(blocks[first]) > 1)
        return sum(ref_count(block) > 1 for block in blocks[first : last + 1])

    def reserve(self, sequence_id: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Makes positions start .. stop - 1 writable by this sequence alone; `start` tokens are already in place.

        Returns:
            Copies (source block, destination block) that must happen before the step writes: a shared block that is partly
            kept. What lies at `start` and after is not kept, so there is at most one.

        Raises:
            CapacityError: not enough free blocks; ask `num_new_blocks` first. Nothing has changed.
            ValueError: the range is empty, or leaves a gap behind the blocks that the sequence has.
        """
        num_new = self.num_new_blocks(sequence_id, start, stop)
        if num_new > self.pool.num_free:
            raise CapacityError(
                f"{num_new} KV blocks are needed, {self.pool.num_free} of {self.pool.num_usable} are free"
            )
        table = self._tables.get(sequence_id) or _Table([])
        if not 0 <= start < stop or start > len(table.blocks) * self.block_size:
            raise ValueError(f"cannot reserve positions {start} to {stop} behind {len(table.blocks)} blocks")
        self._tables[sequence_id] = table
        if num_new == 0:
            return ()
        table.frozen = None
        copies = self._unshare(table.blocks, start, stop)
        while len(table.blocks) < self.blocks_for(stop):
            table.blocks.append(self.pool.allocate())
        return copies

    def _unshare(self, blocks: list[int], start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Replaces the shared blocks among those that positions start .. stop - 1 touch."""
        copies: tuple[tuple[int, int], ...] = ()
        for index in range(start // self.block_size, min(self.blocks_for(stop), len(blocks))):
            shared = blocks[index]
            if self.pool.ref_count(shared) > 1:
                blocks[index] = self.pool.allocate()
                self.pool.release(shared)
                if index * self.block_size < start:
                    copies = ((shared, blocks[index]),)
        return copies

    def fork(self, parent_id: int, child_id: int) -> None:
        """A new sequence that shares every block of its parent. Takes no free block."""
        if child_id in self._tables:
            raise ValueError(f"sequence {child_id} has a block table already")
        parent = self._tables[parent_id]
        for block in parent.blocks:
            self.pool.share(block)
        child = self._tables[child_id] = _Table(parent.blocks.copy())
        child.frozen = parent.frozen

    def trim(self, sequence_id: int, num_tokens: int) -> None:
        """Gives up the blocks behind the first `num_tokens` positions."""
        table = self._tables[sequence_id]
        if len(table.blocks) > self.blocks_for(num_tokens):
            table.frozen = None
            self._give_up(table.blocks, self.blocks_for(num_tokens))

    def release(self, sequence_id: int) -> None:
        """Gives up all blocks and forgets the sequence."""
        self._give_up(self._tables.pop(sequence_id).blocks, 0)

    def _give_up(self, blocks: list[int], num_kept: int) -> None:
        # From the tail: what comes back first is handed out first, and the head of a sequence is what others may want again.
        while len(blocks) > num_kept:
            self.pool.release(blocks.pop())

    def usage(self, computed: Mapping[int, int], known: Mapping[int, int] | None = None) -> MemorySplit:
        """What the pool holds, given how many tokens of each sequence are computed and, if more, known. Walks all tables."""
        known = computed if known is None else known
        tables = [
            (table.blocks, computed.get(sequence_id, 0), known.get(sequence_id, 0))
            for sequence_id, table in self._tables.items()
        ]
        shared = {block for blocks, _, _ in tables for block in blocks if self.pool.ref_count(block) > 1}
        return split_memory(tables, self.block_size, self.pool.num_free, len(shared))

    def check(self) -> None:
        """Asserts that the pool is whole and that its reference counts are exactly the entries of the block tables."""
        self.pool.check()
        entries = Counter(block for table in self._tables.values() for block in table.blocks)
        counts = {block: self.pool.ref_count(block) for block in range(self.pool.num_blocks)}
        assert entries == Counter({block: count for block, count in counts.items() if count}), (
            "references and tables differ"
        )
        assert NULL_BLOCK not in entries, "the null block is in a block table"
        for sequence_id, table in self._tables.items():
            assert len(set(table.blocks)) == len(table.blocks), f"sequence {sequence_id} has a block twice"
            assert table.frozen is None or table.frozen == tuple(table.blocks), f"sequence {sequence_id}: stale tuple"
