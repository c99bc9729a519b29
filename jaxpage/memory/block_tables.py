"""Keeps the block tables of one cache group: which physical blocks hold a sequence's positions.

Blocks are shared until one of the sequences writes (copy-on-write; PagedAttention, SOSP 2023,
section 4.4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, KeysView, Sequence

from jaxpage.errors import CapacityError
from jaxpage.memory.block_pool import NULL_BLOCK, BlockPool
from jaxpage.memory.invariants import check_references, check_table
from jaxpage.memory.swapping import HostTables, Moves, move, num_distinct

# (sequence id, start, stop): positions that a sequence is about to write.
Span = tuple[int, int, int]


def window_blocks(window: int, max_tokens: int, block_size: int) -> int:
    """Returns how many blocks a sequence needs at a time in a group with a sliding window.

    The count is for a step of up to `max_tokens` tokens, wherever a block begins. Two positions
    more than the window stay in the table: the one before the window, so that the last token can be
    computed again, and one before that, so that a block that becomes full finds the block before
    it in the table.

    Args:
        window: The number of positions that a token sees, its own included.
        max_tokens: The most tokens of one sequence that a step computes.
        block_size: The slots of a block (S).
    """
    return (window + max_tokens - 1) // block_size + 2


class Table:
    """Holds a sequence's blocks in order of position.

    Attributes:
        blocks: The blocks.
        frozen: The same as a tuple, which plans take in every step; None after a change.
        num_cached: The number of leading blocks that were offered to the prefix index.
    """

    __slots__ = ("blocks", "frozen", "num_cached")

    def __init__(self, blocks: list[int], num_cached: int = 0) -> None:
        """Makes the table of these blocks."""
        self.blocks = blocks
        self.frozen: tuple[int, ...] | None = None
        self.num_cached = num_cached


class BlockTables:
    """Reserves, forks, trims, releases and swaps block tables over one pool.

    Position p of a sequence lies in slot p % block_size of block p // block_size of its table. A
    block that several tables refer to is read by all of them and written by none: `reserve`
    replaces it first (copy-on-write). `reserve` also replaces a block in the prefix index, even if
    one sequence alone uses it, because a cached block never changes. Where the group's layers have
    a sliding window the null block takes the place of a block that no later token sees:

        window 32, blocks of 16:   [ 0  0 21 25 ]     positions 0..31 are out of the window

    Attributes:
        pool: The pool of physical blocks.
        block_size: The slots of a block (S).
        sliding_window: The number of positions that a token sees; None for all.
        max_tokens: The most tokens of one sequence that a step computes.
        swapped: The tables of swapped sequences, over host blocks.
        reused: Called with each block that is allocated.
        tables: The tables by sequence id.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        host_pool: BlockPool | None = None,
        sliding_window: int | None = None,
        max_tokens: int = 1,
    ) -> None:
        """Makes an empty group.

        Args:
            pool: The pool of physical blocks.
            block_size: The slots of a block (S).
            host_pool: The pool of host blocks to swap to; None where nothing is swapped.
            sliding_window: The number of positions that a token sees, its own included; None for
                all of them.
            max_tokens: The most tokens of one sequence that a step computes; only a group with a
                window uses it.

        Raises:
            ValueError: `block_size` or the window is not positive.
        """
        if block_size < 1:
            raise ValueError(f"{block_size=} must be at least 1")
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"{sliding_window=} must be at least 1")
        self.pool = pool
        self.block_size = block_size
        self.sliding_window = sliding_window
        self.max_tokens = max_tokens
        self.swapped = HostTables(host_pool)
        self.reused: Callable[[int], None] = lambda block: None
        self.tables: dict[int, Table] = {}

    @property
    def sequence_ids(self) -> KeysView[int]:
        """Returns the ids of the sequences that have a table."""
        return self.tables.keys()

    def blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def block_table(self, sequence_id: int) -> tuple[int, ...]:
        """Returns a sequence's blocks in order of position."""
        table = self.tables[sequence_id]
        if table.frozen is None:
            table.frozen = tuple(table.blocks)
        return table.frozen

    def num_passed(self, num_tokens: int) -> int:
        """Returns how many leading blocks no token after the first `num_tokens` needs.

        The position before the window is kept; see `window_blocks`.
        """
        if self.sliding_window is None:
            return 0
        return max(0, num_tokens - self.sliding_window - 1) // self.block_size

    def max_blocks(self, num_tokens: int) -> int:
        """Returns the largest number of blocks that a sequence of this length holds at a time."""
        blocks = self.blocks_for(num_tokens)
        if self.sliding_window is None:
            return blocks
        return min(blocks, window_blocks(self.sliding_window, self.max_tokens, self.block_size))

    def until(self, num_before: int, stop: int) -> int:
        """Returns the position, at most `stop`, up to which a sequence has blocks.

        A sequence in a group with a window holds a fixed number of blocks while it computes: for
        each block that it gives up at the front it takes one at the end.

        Args:
            num_before: The number of leading blocks that the sequence does not write any more.
            stop: The position that is wanted.
        """
        if self.sliding_window is None:
            return stop
        return min(stop, (num_before + self.max_blocks(stop)) * self.block_size)

    def slide(self, sequence_id: int, num_tokens: int) -> None:
        """Gives up the blocks that no token after the first `num_tokens` can see any more."""
        if self.sliding_window is None or (table := self.tables.get(sequence_id)) is None:
            return
        # From the back: passed blocks are at the front, so all before a null block are null, too.
        for index in range(min(self.num_passed(num_tokens), len(table.blocks)) - 1, -1, -1):
            if table.blocks[index] == NULL_BLOCK:
                return
            self.pool.release(table.blocks[index])
            table.blocks[index] = NULL_BLOCK
            table.frozen = None

    def can_write(self, sequence_id: int, position: int) -> bool:
        """Returns whether the sequence can write this position without a new block.

        This is the common case of a decoding sequence: the last block of 16 still has room.
        """
        blocks = self.tables[sequence_id].blocks
        place = position // self.block_size
        return place < len(blocks) and self.pool.is_writable(blocks[place])

    def num_new_blocks(self, sequence_id: int, start: int, stop: int) -> int:
        """Returns how many free blocks `reserve` takes to grow and to replace shared blocks."""
        table = self.tables.get(sequence_id)
        if table is None:
            return self.blocks_for(stop)
        blocks = table.blocks
        is_writable = self.pool.is_writable
        first = start // self.block_size
        last = (stop - 1) // self.block_size
        if last >= len(blocks):
            return last + 1 - len(blocks) + sum(not is_writable(block) for block in blocks[first:])
        if first == last:  # the common case: a sequence that decodes and shares its last block
            return int(not is_writable(blocks[first]))
        return sum(not is_writable(block) for block in blocks[first : last + 1])

    def num_new_blocks_together(self, spans: Sequence[Span]) -> int:
        """Returns how many free blocks `reserve` takes when it is called for each span in turn.

        Of several sequences that share a block and write to it, the last one needs no copy: it owns
        the block by then.
        """
        if len(spans) == 1:
            return self.num_new_blocks(*spans[0])
        growth = 0
        written: Counter[int] = Counter()
        for sequence_id, start, stop in spans:
            blocks = self.tables[sequence_id].blocks
            growth += max(0, self.blocks_for(stop) - len(blocks))
            written.update(blocks[start // self.block_size : self.blocks_for(stop)])
        num_shared = written.total()
        for block, count in written.items():
            if count == self.pool.ref_count(block) and not self.pool.is_kept(block):
                num_shared -= 1
        return growth + num_shared

    def reserve(self, sequence_id: int, start: int, stop: int) -> Moves:
        """Makes positions start to stop - 1 writable by this sequence alone.

        The first `start` tokens are computed already. Ask `num_new_blocks` first.

        Returns:
            The copies (source block, destination block) that must happen before the step writes.
            There is at most one: the shared block that holds positions before `start`.

        Raises:
            CapacityError: There are too few free blocks. Nothing has changed.
            ValueError: The range is empty, leaves a gap after the blocks of the sequence, or leaves
                cached blocks after it (`trim` first).
        """
        num_new = self.num_new_blocks(sequence_id, start, stop)
        if num_new > self.pool.num_free:
            free = f"{self.pool.num_free} of {self.pool.num_usable} are free"
            raise CapacityError(f"{num_new} KV blocks are needed, {free}")
        # It is noted below, once nothing can fail any more.
        table = self.tables.get(sequence_id) or Table([])
        if not 0 <= start < stop or start > len(table.blocks) * self.block_size:
            place = f"after {len(table.blocks)} blocks"
            raise ValueError(f"cannot reserve positions {start} to {stop} {place}")
        if any(self.pool.is_kept(block) for block in table.blocks[start // self.block_size + 1 :]):
            place = "before cached ones: trim first"
            raise ValueError(f"cannot reserve positions {start} to {stop} {place}")
        self.tables[sequence_id] = table
        if num_new == 0:
            return ()
        table.frozen = None
        copies = self._unshare(table.blocks, start, stop)
        while len(table.blocks) < self.blocks_for(stop):
            table.blocks.append(self._allocate())
        # What is written from here on is not in the index.
        table.num_cached = min(table.num_cached, start // self.block_size)
        return copies

    def _allocate(self) -> int:
        block = self.pool.allocate()
        self.reused(block)
        return block

    def _unshare(self, blocks: list[int], start: int, stop: int) -> Moves:
        """Replaces the shared and the cached blocks that hold positions start to stop - 1.

        Only the first of them can hold computed tokens, at positions before `start`; it is copied:

            table [ 5  8 ]   8: 2 references   write position 20   table [ 5 12 ]   8: 1, 12: 1
        """
        copies: Moves = ()
        for index in range(start // self.block_size, min(self.blocks_for(stop), len(blocks))):
            shared = blocks[index]
            if not self.pool.is_writable(shared):
                blocks[index] = self._allocate()
                self.pool.release(shared)
                if index * self.block_size < start:
                    copies = ((shared, blocks[index]),)
        return copies

    def fork(self, parent_id: int, child_id: int) -> None:
        """Makes a new sequence that shares every block of its parent; this takes no free block."""
        if child_id in self.tables:
            raise ValueError(f"sequence {child_id} has a block table already")
        parent = self.tables[parent_id]
        self._share(parent.blocks)
        child = self.tables[child_id] = Table(parent.blocks.copy(), parent.num_cached)
        child.frozen = parent.frozen

    def trim(self, sequence_id: int, num_tokens: int) -> None:
        """Gives up the blocks after the first `num_tokens` positions."""
        table = self.tables[sequence_id]
        if len(table.blocks) > self.blocks_for(num_tokens):
            table.frozen = None
            self._give_up(table.blocks, self.blocks_for(num_tokens))
        table.num_cached = min(table.num_cached, num_tokens // self.block_size)

    def release(self, sequence_id: int) -> None:
        """Gives up all blocks and forgets the sequence."""
        self._give_up(self.tables.pop(sequence_id).blocks, 0)

    def _give_up(self, blocks: list[int], num_kept: int) -> None:
        # Blocks are given up from the tail: the pool hands out first what came back first, and the
        # head of a sequence is what other requests may want again. The prefix index relies on this
        # order, because it cannot use a block without those before it.
        while len(blocks) > num_kept:
            if (block := blocks.pop()) != NULL_BLOCK:
                self.pool.release(block)

    def _share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block != NULL_BLOCK:
                self.pool.share(block)

    def num_revived(self, blocks: Iterable[int]) -> int:
        """Returns how many free blocks `adopt` takes: each block that nothing uses counts once."""
        return sum(self.pool.ref_count(block) == 0 for block in set(blocks) - {NULL_BLOCK})

    def adopt(self, sequence_id: int, blocks: Sequence[int], num_tokens: int) -> None:
        """Makes a new sequence of blocks that hold its first `num_tokens` tokens.

        The blocks are shared with all sequences that use them. Blocks that are out of the new
        sequence's window are not taken.
        """
        if sequence_id in self.tables:
            raise ValueError(f"sequence {sequence_id} has a block table already")
        not_kept = (index for index, block in enumerate(blocks) if not self.pool.is_kept(block))
        num_cached = next(not_kept, len(blocks))
        self._share(blocks)
        self.tables[sequence_id] = Table(list(blocks), num_cached)
        self.slide(sequence_id, num_tokens)  # after sharing, so that the blocks count as used last

    def replace(self, sequence_id: int, place: int, block: int) -> None:
        """Replaces a block by another one with the same content."""
        table = self.tables[sequence_id]
        self.pool.share(block)
        self.pool.release(table.blocks[place])
        table.blocks[place] = block
        table.frozen = None

    def can_swap_out(self, sequence_ids: Sequence[int]) -> bool:
        """Returns whether there are host blocks for everything that these sequences hold."""
        return self.swapped.has_room(
            [self.tables[sequence_id].blocks for sequence_id in sequence_ids]
        )

    def swap_out(self, sequence_ids: Sequence[int]) -> Moves:
        """Moves the block tables of sequences to host blocks; shared blocks stay shared there.

        Ask `can_swap_out` first, and `trim` the blocks of tokens that are not computed.

        Returns:
            The pairs (block, host block) that must be moved before anything else is written.
        """
        tables = [self.tables[sequence_id].blocks for sequence_id in sequence_ids]
        moves = self.swapped.store(sequence_ids, tables)
        # The first sequence comes last, because its head is what other requests may want again.
        for sequence_id in reversed(sequence_ids):
            self.release(sequence_id)
        return moves

    def num_swap_in_blocks(self, spans: Sequence[Span]) -> int:
        """Returns how many free blocks `swap_in` and then `reserve` take for these spans."""
        tables = [self.swapped.table(sequence_id) for sequence_id, _, _ in spans]
        growth = 0
        written: Counter[int] = Counter()  # the partly filled last blocks
        for table, (_, start, stop) in zip(tables, spans, strict=True):
            growth += self.blocks_for(stop) - len(table)
            if start % self.block_size:
                written[table[-1]] += 1
        # Of several sequences that write to a block, the last one owns it by then and needs no
        # copy.
        return num_distinct(tables) + growth + sum(count - 1 for count in written.values())

    def swap_in(self, sequence_ids: Sequence[int]) -> Moves:
        """Moves swapped sequences back to blocks of the pool; ask `num_swap_in_blocks` first.

        Returns:
            The pairs (host block, block) that must be moved before the step writes.
        """
        tables = [self.swapped.table(sequence_id) for sequence_id in sequence_ids]
        copies, moves = move(tables, self._allocate, self.pool.share)
        for sequence_id, blocks in zip(sequence_ids, copies, strict=True):
            self.tables[sequence_id] = Table(blocks)
            self.swapped.drop(sequence_id)
        return moves

    def check(self) -> None:
        """Asserts the invariants of pools and tables, and that they agree."""
        slides = self.sliding_window is not None
        check_references(self.pool, {key: table.blocks for key, table in self.tables.items()})
        self.swapped.check()
        for sequence_id, table in self.tables.items():
            check_table(table.blocks, slides=slides)
            assert sequence_id not in self.swapped, f"sequence {sequence_id} is in two pools"
            is_fresh = table.frozen in (None, tuple(table.blocks))
            assert is_fresh, f"sequence {sequence_id}: the tuple is not that of its blocks"
