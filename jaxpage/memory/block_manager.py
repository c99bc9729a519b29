"""The block tables: which physical blocks hold a sequence's positions, shared between sequences until one of them writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass

from jaxpage.errors import CapacityError
from jaxpage.memory.block_pool import NULL_BLOCK, BlockPool
from jaxpage.memory.invariants import check_cached, check_references, check_table
from jaxpage.memory.memory_split import MemorySplit, split_memory
from jaxpage.memory.prefix_index import Digest, PrefixIndex
from jaxpage.memory.sliding import num_passed
from jaxpage.memory.swapping import HostTables, Moves, moved, num_distinct


class _Table:
    """A sequence's blocks in order of position, and the same as a tuple until it changes: plans take it every step."""

    __slots__ = ("blocks", "frozen", "num_cached")

    def __init__(self, blocks: list[int], num_cached: int = 0) -> None:
        self.blocks = blocks
        self.frozen: tuple[int, ...] | None = None
        self.num_cached = num_cached  # of its first blocks: what they hold is in the prefix index


@dataclass(frozen=True)
class Pin:
    """A prefix that stays in place: what its block table holds."""

    token_ids: tuple[int, ...]
    salt: str | None


class BlockManager:
    """Reserves, forks, trims, releases and swaps block tables over one pool.

    Position p of a sequence lives in slot p % block_size of block p // block_size of its table. A block that several tables
    refer to is read by all of them and written by none: `reserve` replaces it first (copy-on-write). So is a block whose
    content is in the prefix index, be it one sequence's alone: what is cached never changes. Where every layer of a model sees a
    window only, the null block stands in a table for what no later token sees.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        prefix_index: PrefixIndex | None = None,
        *,
        host_pool: BlockPool | None = None,
        sliding_window: int | None = None,
    ) -> None:
        """
        Args:
            block_size: S.
            prefix_index: None: nothing is cached.
            host_pool: of blocks to swap to; None: nothing is swapped.
            sliding_window: positions that a token sees in any layer, its own included; None: all.

        Raises:
            ValueError: `block_size` or the window is not positive.
        """
        if block_size < 1:
            raise ValueError(f"{block_size=} must be at least 1")
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"{sliding_window=} must be at least 1")
        assert prefix_index is None or prefix_index.block_size == block_size
        self.pool = pool
        self.block_size = block_size
        self.prefix_index = prefix_index
        self.swapped = HostTables(host_pool)
        self.pins: dict[int, Pin] = {}  # by the id of their block tables
        self.sliding_window = sliding_window
        self._tables: dict[int, _Table] = {}

    @property
    def sequence_ids(self) -> KeysView[int]:
        """Who owns blocks, or may: every sequence that was reserved for or forked, and not released; and the pins."""
        return self._tables.keys()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def block_table(self, sequence_id: int) -> tuple[int, ...]:
        table = self._tables[sequence_id]
        if table.frozen is None:
            table.frozen = tuple(table.blocks)
        return table.frozen

    def can_write(self, sequence_id: int, position: int) -> bool:
        """Whether the sequence has a block for this position that it may write into: mostly so when it decodes."""
        blocks, place = self._tables[sequence_id].blocks, position // self.block_size
        return place < len(blocks) and self.pool.is_writable(blocks[place])

    def num_new_blocks(self, sequence_id: int, start: int, stop: int) -> int:
        """Free blocks that `reserve` would take: for growth, and to replace shared blocks in the written range."""
        table = self._tables.get(sequence_id)
        if table is None:
            return self.blocks_for(stop)
        blocks, is_writable = table.blocks, self.pool.is_writable
        first, last = start // self.block_size, (stop - 1) // self.block_size
        if last >= len(blocks):
            return last + 1 - len(blocks) + sum(not is_writable(block) for block in blocks[first:])
        if first == last:  # mostly a decoding sequence, which asks only where it shares the block
            return int(not is_writable(blocks[first]))
        return sum(not is_writable(block) for block in blocks[first : last + 1])

    def num_new_blocks_together(self, spans: Sequence[tuple[int, int, int]]) -> int:
        """Free blocks that `reserve` takes when it is called for each (sequence id, start, stop) in turn.

        Of the sequences that write to a block which nobody else has, the last finds it its own.
        """
        if len(spans) == 1:
            return self.num_new_blocks(*spans[0])
        growth, written = 0, Counter[int]()
        for sequence_id, start, stop in spans:
            blocks = self._tables[sequence_id].blocks
            growth += max(0, self.blocks_for(stop) - len(blocks))
            written.update(blocks[start // self.block_size : self.blocks_for(stop)])
        unshared = sum(
            count == self.pool.ref_count(block) for block, count in written.items() if not self.pool.is_kept(block)
        )
        return growth + written.total() - unshared

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
            for behind in self.prefix_index.forget(block):
                self.pool.unkeep(behind)
        return block

    def num_passed(self, num_tokens: int) -> int:
        """How many of a sequence's first blocks nobody needs who goes on behind its first `num_tokens` tokens."""
        return 0 if self.sliding_window is None else num_passed(num_tokens, self.sliding_window, self.block_size)

    def slide(self, sequence_id: int, num_tokens: int) -> None:
        """Gives up the blocks that fell out of the window of a sequence that goes on behind `num_tokens` tokens."""
        if self.sliding_window is None or (table := self._tables.get(sequence_id)) is None:
            return
        for place in range(min(self.num_passed(num_tokens), len(table.blocks)) - 1, -1, -1):
            if table.blocks[place] == NULL_BLOCK:
                return
            self.pool.release(table.blocks[place])
            table.blocks[place], table.frozen = NULL_BLOCK, None

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
        self._share(parent.blocks)
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
            if (block := blocks.pop()) != NULL_BLOCK:
                self.pool.release(block)

    def _share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block != NULL_BLOCK:
                self.pool.share(block)

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
        return sum(self.pool.ref_count(block) == 0 for block in set(blocks) - {NULL_BLOCK})

    def adopt(self, sequence_id: int, blocks: Sequence[int], num_tokens: int | None = None) -> None:
        """A new sequence that begins with blocks that hold its first `num_tokens` tokens (None: as many as there are slots).

        They are shared with whoever else uses them. Those that are out of its window are left to the others.
        """
        if sequence_id in self._tables:
            raise ValueError(f"sequence {sequence_id} has a block table already")
        num_tokens = len(blocks) * self.block_size if num_tokens is None else num_tokens
        num_cached = next((n for n, block in enumerate(blocks) if not self.pool.is_kept(block)), len(blocks))
        self._share(blocks)
        self._tables[sequence_id] = _Table(list(blocks), num_cached)
        self.slide(sequence_id, num_tokens)  # after they were shared: they count as used now, the first ones last

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
            if block == NULL_BLOCK:
                return  # it fell out of the window before it could be cached
            tokens = tuple(token_ids[place * size : (place + 1) * size])
            known = index.register(block, digests[place], parent, tokens)
            if known is None or (known != block and self.pool.ref_count(block) > 1):
                return  # the chain is broken, or a fork has the block too and would keep it behind another's
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

    def can_swap_out(self, sequence_ids: Sequence[int]) -> bool:
        """Whether there are host blocks for all that these sequences hold."""
        return self.swapped.has_room([self._tables[sequence_id].blocks for sequence_id in sequence_ids])

    def swap_out(self, sequence_ids: Sequence[int]) -> Moves:
        """Moves the block tables of sequences to host blocks; what they share they share there. `trim` what is not computed first.

        Returns (block, host block) pairs: what has to be moved before anything else is written. Ask `can_swap_out` first.
        """
        moves = self.swapped.store(sequence_ids, [self._tables[sequence_id].blocks for sequence_id in sequence_ids])
        for sequence_id in reversed(sequence_ids):
            self.release(sequence_id)
        return moves

    def num_swap_in_blocks(self, spans: Sequence[tuple[int, int, int]]) -> int:
        """Free blocks that `swap_in` and then `reserve` would take, for (sequence id, start, stop) of each sequence."""
        tables = [self.swapped.table(sequence_id) for sequence_id, _, _ in spans]
        growth = sum(self.blocks_for(stop) - len(table) for table, (_, _, stop) in zip(tables, spans, strict=True))
        written = Counter(
            table[-1] for table, (_, start, _) in zip(tables, spans, strict=True) if start % self.block_size
        )
        return num_distinct(tables) + growth + sum(count - 1 for count in written.values())

    def swap_in(self, sequence_ids: Sequence[int]) -> Moves:
        """Moves them back to blocks of the pool. Returns (host block, block) pairs. Ask `num_swap_in_blocks` first."""
        tables = [self.swapped.table(sequence_id) for sequence_id in sequence_ids]
        copies, moves = moved(tables, self._allocate, self.pool.share)
        for sequence_id, blocks in zip(sequence_ids, copies, strict=True):
            self._tables[sequence_id] = _Table(blocks)
            self.swapped.drop(sequence_id)
        return moves

    def pin(self, pin_id: int, sequence_id: int, pin: Pin) -> None:
        """Keeps in place what a sequence has computed of its first tokens, under an id of its own, until `unpin`."""
        self.fork(sequence_id, pin_id)
        self.trim(pin_id, len(pin.token_ids))
        self.pins[pin_id] = pin

    def unpin(self, pin_id: int) -> None:
        del self.pins[pin_id]
        self.release(pin_id)

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that are in the table of a pin, each once."""
        return num_distinct(self._tables[pin_id].blocks for pin_id in self.pins)

    def find_pinned(self, token_ids: Sequence[int], salt: str | None) -> tuple[list[int], int]:
        """The blocks of the pin that these tokens share most with, and how many tokens they hold.

        The last token is left out, as in `find`. The last block may be partly filled where the whole pin is found, or the tokens end
        within it: who writes to it copies it first.
        """
        found: list[int] = []
        num_found = 0
        for pin_id, pin in self.pins.items():
            if pin.salt != salt:
                continue
            most = min(len(pin.token_ids), len(token_ids) - 1)
            num_common = _num_common(token_ids, pin.token_ids, most)
            num_tokens = num_common if num_common == most else num_common // self.block_size * self.block_size
            blocks = self._tables[pin_id].blocks[: self.blocks_for(num_tokens)]
            if num_tokens > num_found and NULL_BLOCK not in blocks[self.num_passed(num_tokens) :]:
                found, num_found = blocks, num_tokens
        return found, num_found

    def usage(self, computed: Mapping[int, int], known: Mapping[int, int] | None = None) -> MemorySplit:
        """What the pool holds, given how many tokens of each sequence are computed and, if more, known. Walks all tables."""
        known = computed if known is None else known
        tables = [
            (table.blocks, computed.get(sequence_id, 0), known.get(sequence_id, 0))
            for sequence_id, table in self._tables.items()
            if sequence_id not in self.pins
        ]
        pinned = [(self._tables[pin_id].blocks, len(pin.token_ids)) for pin_id, pin in self.pins.items()]
        return split_memory(tables, self.block_size, self.pool.num_free, pinned)

    def check(self) -> None:
        """Asserts that pools, tables, pins and index are whole and agree."""
        tables = {sequence_id: table.blocks for sequence_id, table in self._tables.items()}
        cached = {sequence_id: table.blocks[: table.num_cached] for sequence_id, table in self._tables.items()}
        slides = self.sliding_window is not None
        check_references(self.pool, tables)
        check_cached(self.pool, self.prefix_index, cached, slides=slides)
        self.swapped.check()
        assert self.pins.keys() <= tables.keys(), "a pin has no block table"
        for sequence_id, table in self._tables.items():
            check_table(table.blocks, slides=slides)
            assert sequence_id not in self.swapped, f"sequence {sequence_id} is in two pools"
            assert table.frozen is None or table.frozen == tuple(table.blocks), f"sequence {sequence_id}: stale tuple"


def _num_common(first: Sequence[int], second: Sequence[int], most: int) -> int:
    """How many tokens both begin with, up to `most`: by bisection over slices, which Python compares fast."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if tuple(first[low:middle]) == tuple(second[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
