"""The block tables: which physical blocks hold a sequence's positions, shared between sequences until one of them writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, KeysView, Mapping, Sequence

from jaxpage.errors import CapacityError
from jaxpage.memory.block_pool import NULL_BLOCK, BlockPool
from jaxpage.memory.memory_split import MemorySplit, split_memory
from jaxpage.memory.prefix_index import Digest, PrefixIndex


class _Table:
    """A sequence's blocks in order of position, and the same as a tuple until it changes: plans take it every step."""

    __slots__ = ("blocks", "frozen", "num_cached")

    def __init__(self, blocks: list[int], num_cached: int = 0) -> None:
        self.blocks = blocks
        self.frozen: tuple[int, ...] | None = None
        self.num_cached = num_cached  # of its first blocks: what they hold is in the prefix index


class BlockManager:
    """Reserves, forks, trims and releases block tables over one pool.

    Position p of a sequence lives in slot p % block_size of block p // block_size of its table. A block that several tables
    refer to is read by all of them and written by none: `reserve` replaces it first (copy-on-write). So is a block whose
    content is in the prefix index, be it one sequence's alone: what is cached never changes.
    """

    def __init__(self, pool: BlockPool, block_size: int, prefix_index: PrefixIndex | None = None) -> None:
        """Without a prefix index nothing is cached. Raises ValueError unless `block_size`, S, is positive."""
        if block_size < 1:
            raise ValueError(f"{block_size=} must be at least 1")
        assert prefix_index is None or prefix_index.block_size == block_size
        self.pool = pool
        self.block_size = block_size
        self.prefix_index = prefix_index
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
        blocks, is_writable = table.blocks, self.pool.is_writable
        first, last = start // self.block_size, (stop - 1) // self.block_size
        if last >= len(blocks):
            return last + 1 - len(blocks) + sum(not is_writable(block) for block in blocks[first:])
        if first == last:  # a decoding sequence, every step
            return int(not is_writable(blocks[first]))
        return sum(not is_writable(block) for block in blocks[first : last + 1])

    def reserve(self, sequence_id: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Makes positions start .. stop - 1 writable by this sequence alone; `start` tokens are already in place.

        Returns:
            Copies (source block, destination block) that must happen before the step writes: a shared block that is partly
            kept. What lies at `start` and after is not kept, so there is at most one.

        Raises:
            CapacityError: not enough free blocks; ask `num_new_blocks` first. Nothing has changed.
            ValueError: the range is empty, leaves a gap behind the blocks that the sequence has, or leaves cached blocks behind
                it: `trim` first.
        """
        num_new = self.num_new_blocks(sequence_id, start, stop)
        if num_new > self.pool.num_free:
            raise CapacityError(
                f"{num_new} KV blocks are needed, {self.pool.num_free} of {self.pool.num_usable} are free"
            )
        table = self._tables.get(sequence_id) or _Table([])
        if not 0 <= start < stop or start > len(table.blocks) * self.block_size:
            raise ValueError(f"cannot reserve positions {start} to {stop} behind {len(table.blocks)} blocks")
        if any(self.pool.is_kept(block) for block in table.blocks[start // self.block_size + 1 :]):
            raise ValueError(f"cannot reserve positions {start} to {stop} before cached ones: trim first")
        self._tables[sequence_id] = table
        if num_new == 0:
            return ()
        table.frozen = None
        copies = self._unshare(table.blocks, start, stop)
        while len(table.blocks) < self.blocks_for(stop):
            table.blocks.append(self._allocate())
        table.num_cached = min(table.num_cached, start // self.block_size)
        return copies

    def _allocate(self) -> int:
        block = self.pool.allocate()
        if self.prefix_index is not None:
            self.prefix_index.forget(block)
        return block

    def _unshare(self, blocks: list[int], start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Replaces the shared and the cached blocks among those that positions start .. stop - 1 touch."""
        copies: tuple[tuple[int, int], ...] = ()
        for index in range(start // self.block_size, min(self.blocks_for(stop), len(blocks))):
            shared = blocks[index]
            if not self.pool.is_writable(shared):
                blocks[index] = self._allocate()
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
        child = self._tables[child_id] = _Table(parent.blocks.copy(), parent.num_cached)
        child.frozen = parent.frozen

    def trim(self, sequence_id: int, num_tokens: int) -> None:
        """Gives up the blocks behind the first `num_tokens` positions."""
        table = self._tables[sequence_id]
        if len(table.blocks) > self.blocks_for(num_tokens):
            table.frozen = None
            self._give_up(table.blocks, self.blocks_for(num_tokens))
        table.num_cached = min(table.num_cached, num_tokens // self.block_size)

    def release(self, sequence_id: int) -> None:
        """Gives up all blocks and forgets the sequence."""
        self._give_up(self._tables.pop(sequence_id).blocks, 0)

    def _give_up(self, blocks: list[int], num_kept: int) -> None:
        # From the tail: what comes back first is handed out first, and the head of a sequence is what others may want again.
        # The prefix index needs it so, since a block is of no use to it without those before.
        while len(blocks) > num_kept:
            self.pool.release(blocks.pop())

    def find(self, token_ids: Sequence[int], digests: list[Digest], salt: str | None) -> list[int]:
        """The cached blocks that hold the longest prefix of these tokens, at least one token left out: its logits are wanted.

        They may be in use or free; `adopt` them before anything else is allocated.

        Args:
            digests: of the first blocks of the sequence, as far as they are known; grows, so that no block is hashed twice.
        """
        index = self.prefix_index
        if index is None:
            return []
        num_blocks = (len(token_ids) - 1) // self.block_size
        return index.match(index.extend(digests, token_ids, salt, num_blocks)[:num_blocks], token_ids, salt)

    def num_revived(self, blocks: Iterable[int]) -> int:
        """How many free blocks `adopt` would take: those that nobody uses, each once however often it is named."""
        return sum(self.pool.ref_count(block) == 0 for block in set(blocks))

    def adopt(self, sequence_id: int, blocks: Sequence[int]) -> None:
        """A new sequence that begins with cached blocks. They are shared with whoever else uses them."""
        if sequence_id in self._tables:
            raise ValueError(f"sequence {sequence_id} has a block table already")
        for block in blocks:
            self.pool.share(block)
        self._tables[sequence_id] = _Table(list(blocks), len(blocks))

    def cache(
        self, sequence_id: int, num_computed: int, token_ids: Sequence[int], digests: list[Digest], salt: str | None
    ) -> None:
        """Notes the full blocks among the first `num_computed` tokens of a sequence in the index, for others to find.

        A block whose content is known from another block already is given up for that one, so that the blocks before a cached
        block are always the cached ones.
        """
        index, table, size = self.prefix_index, self._tables[sequence_id], self.block_size
        if index is None:
            return
        index.extend(digests, token_ids, salt, num_computed // size)
        for place in range(table.num_cached, num_computed // size):
            block, parent = table.blocks[place], table.blocks[place - 1] if place else salt
            tokens = tuple(token_ids[place * size : (place + 1) * size])
            known = index.register(block, digests[place], parent, tokens)
            if known is None or (known != block and self.pool.ref_count(block) > 1):
                return  # a collision, or a fork has the block too and would keep it behind another's
            if known == block:
                self.pool.keep(block)
            else:
                self.pool.share(known)
                self.pool.release(block)
                table.blocks[place], table.frozen = known, None
            table.num_cached = place + 1

    def forget_cached(self) -> None:
        """Nothing is cached any more. Block tables stay as they are."""
        if self.prefix_index is not None:
            self.prefix_index.clear()
        self.pool.forget()
        for table in self._tables.values():
            table.num_cached = 0

    def usage(self, computed: Mapping[int, int], known: Mapping[int, int] | None = None) -> MemorySplit:
        """What the pool holds, given how many tokens of each sequence are computed and, if more, known. Walks all tables."""
        known = computed if known is None else known
        tables = [
            (table.blocks, computed.get(sequence_id, 0), known.get(sequence_id, 0))
            for sequence_id, table in self._tables.items()
        ]
        return split_memory(tables, self.block_size, self.pool.num_free)

    def check(self) -> None:
        """Asserts that the pool is whole, its reference counts exactly the entries of the block tables, its kept blocks the index."""
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
        self._check_cached()

    def _check_cached(self) -> None:
        index, pool = self.prefix_index, self.pool
        kept = {block for block in range(pool.num_blocks) if pool.is_kept(block)}
        if index is None:
            assert not kept, "blocks are kept without an index"
            return
        index.check()
        assert len(index) == len(kept) and all(block in index for block in kept), "kept blocks are those of the index"
        for sequence_id, table in self._tables.items():
            cached = table.blocks[: table.num_cached]
            assert kept.issuperset(cached), f"sequence {sequence_id}: a cached block is not kept"
            parents = [index.entry(block).parent for block in cached]
            assert parents[1:] == cached[:-1], f"sequence {sequence_id}: its cached blocks are no chain"
        evicted: set[int] = set()
        for block in pool.cached_blocks():
            assert index.entry(block).parent not in evicted, f"block {block} would outlive the block before it"
            evicted.add(block)
