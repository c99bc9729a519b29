"""Block tables of all cache groups together: what a sequence holds it holds in each of them; prefixes that others find; pins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpage.memory.block_pool import NULL_BLOCK
from jaxpage.memory.block_tables import BlockTables, Span
from jaxpage.memory.cached_blocks import CachedBlocks
from jaxpage.memory.memory_split import MemorySplit, split_memory
from jaxpage.memory.prefix_index import Digest, PrefixIndex
from jaxpage.memory.swapping import Moves, num_distinct

Counts = tuple[int, ...]  # blocks, of each cache group


@dataclass(frozen=True)
class Pin:
    """A prefix that stays in place: what its block tables hold."""

    token_ids: tuple[int, ...]
    salt: str | None


class Prefix(NamedTuple):
    """Blocks of others that hold the first tokens of a sequence. The null block stands for what is out of a window."""

    blocks: tuple[list[int], ...]  # of each cache group, as many
    num_tokens: int


class BlockManager:
    """One `BlockTables` for each cache group, kept in step.

    The first group is that of the layers that see most, the whole sequence if any do: its blocks are what the prefix index knows, and the
    others' blocks of the same tokens go with them. No two pools have an id in common but that of the null block.
    """

    def __init__(self, groups: Sequence[BlockTables], prefix_index: PrefixIndex | None = None) -> None:
        """prefix_index: None: nothing is cached."""
        self.groups = tuple(groups)
        self.block_size = self.groups[0].block_size
        self.pins: dict[int, Pin] = {}  # by the id of their block tables
        self.slides = any(group.sliding_window is not None for group in self.groups)
        self.cached = None if prefix_index is None else CachedBlocks(self.groups, prefix_index)

    @property
    def sequence_ids(self) -> KeysView[int]:
        """Who owns blocks, or may: every sequence that was reserved for or forked, and not released; and the pins."""
        return self.groups[0].sequence_ids

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out at all."""
        return sum(group.pool.num_usable for group in self.groups)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, the cached ones included."""
        return sum(group.pool.num_free for group in self.groups)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content is kept until they are handed out."""
        return sum(group.pool.num_cached for group in self.groups)

    @property
    def used_share(self) -> float:
        """Of the pool that is used most, 0 to 1."""
        return max(1 - group.pool.num_free / group.pool.num_usable for group in self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        return self.groups[0].blocks_for(num_tokens)

    def most_blocks(self, num_tokens: int) -> Counts:
        """The blocks that a sequence of so many tokens holds at most at a time."""
        return tuple(group.most_blocks(num_tokens) for group in self.groups)

    def block_table(self, sequence_id: int) -> tuple[int, ...]:
        """Of the first group."""
        return self.groups[0].block_table(sequence_id)

    def further_tables(self, sequence_id: int) -> tuple[tuple[int, ...], ...]:
        """Of the other groups."""
        return tuple(group.block_table(sequence_id) for group in self.groups[1:])

    def is_used(self, block: int) -> bool:
        """Whether any table refers to it."""
        return any(
            group.pool.first <= block < group.pool.num_blocks and group.pool.ref_count(block) > 0
            for group in self.groups
        )

    # Room, which is there in every group or not at all

    def can_write(self, sequence_id: int, position: int) -> bool:
        """Whether the sequence has blocks for this position that it may write into: mostly so when it decodes."""
        return all([group.can_write(sequence_id, position) for group in self.groups])

    def has_room(self, spans: Sequence[Span]) -> bool:
        """Whether `reserve` can be called for each span in turn."""
        return all(group.num_new_blocks_together(_cut(group, spans)) <= group.pool.num_free for group in self.groups)

    def fits(self, needed: Counts, spare: Callable[[int], int] = lambda num_usable: 0) -> bool:
        """Whether so many blocks are free. spare: blocks that must then be left, of a pool with so many usable ones."""
        return all(
            count <= group.pool.num_free - spare(group.pool.num_usable)
            for count, group in zip(needed, self.groups, strict=True)
        )

    def reserve(self, sequence_id: int, start: int, stop: int) -> Moves:
        """Makes positions start .. stop - 1 writable by this sequence alone; where a window slides, as many of them as it has blocks for.

        Returns (source block, destination block) copies that must happen before the step writes. Ask `has_room` first.

        Raises CapacityError, ValueError: see `BlockTables.reserve`.
        """
        span = (sequence_id, start, stop)
        return tuple(copy for group in self.groups for copy in group.reserve(*_cut(group, [span])[0]))

    def slide(self, sequence_id: int, num_tokens: int) -> None:
        """Gives up the blocks that fell out of the windows of a sequence that goes on behind `num_tokens` tokens."""
        for group in self.groups:
            group.slide(sequence_id, num_tokens)

    def fork(self, parent_id: int, child_id: int) -> None:
        """A new sequence that shares every block of its parent. Takes no free block."""
        for group in self.groups:
            group.fork(parent_id, child_id)

    def trim(self, sequence_id: int, num_tokens: int) -> None:
        """Gives up the blocks behind the first `num_tokens` positions."""
        for group in self.groups:
            group.trim(sequence_id, num_tokens)

    def release(self, sequence_id: int) -> None:
        """Gives up all blocks and forgets the sequence."""
        for group in self.groups:
            group.release(sequence_id)

    # Prefixes that are in place

    @property
    def nothing(self) -> Prefix:
        return Prefix(tuple([] for _ in self.groups), 0)

    def find(self, token_ids: Sequence[int], digests: list[Digest], salt: str | None) -> Prefix:
        """The cached blocks that hold the longest prefix of these tokens, at least one token left out: its logits are wanted.

        They may be in use or free; `begin` with them before anything else is allocated.

        Args:
            digests: of the first blocks of the sequence, as far as they are known; grows, so that no block is hashed twice.
        """
        if self.cached is None:
            return self.nothing
        blocks = self.cached.find(token_ids, digests, salt)
        return Prefix(blocks, len(blocks[0]) * self.block_size)

    def find_pinned(self, token_ids: Sequence[int], salt: str | None) -> Prefix:
        """The blocks of the pin that these tokens share most with.

        The last token is left out, as in `find`. The last block may be partly filled where the whole pin is found, or the tokens end
        within it: who writes to it copies it first.
        """
        found = self.nothing
        for pin_id, pin in self.pins.items():
            if pin.salt != salt:
                continue
            most = min(len(pin.token_ids), len(token_ids) - 1)
            num_common = _num_common(token_ids, pin.token_ids, most)
            num_tokens = num_common if num_common == most else num_common // self.block_size * self.block_size
            if num_tokens <= found.num_tokens:
                continue
            num_blocks = self.blocks_for(num_tokens)
            blocks = tuple(group.tables[pin_id].blocks[:num_blocks] for group in self.groups)
            if all(
                NULL_BLOCK not in held[g.num_passed(num_tokens) :] for held, g in zip(blocks, self.groups, strict=True)
            ):
                found = Prefix(blocks, num_tokens)
        return found

    def num_to_begin(self, beginnings: Sequence[tuple[int, Prefix]]) -> Counts:
        """Free blocks that `begin` takes for sequences of so many known tokens: cached ones count unless they are in use, each once."""
        counts = []
        for index, group in enumerate(self.groups):
            num_new, revived = 0, set[int]()
            for num_known, prefix in beginnings:
                blocks = prefix.blocks[index]
                num_new += self.blocks_for(group.until(len(blocks), num_known)) - len(blocks)
                # The last block, if it is partly filled, is written, and another sequence uses it: a copy.
                num_new += prefix.num_tokens % self.block_size > 0
                revived.update(blocks[group.num_passed(prefix.num_tokens) :])
            counts.append(num_new + group.num_revived(revived))
        return tuple(counts)

    def begin(self, beginnings: Sequence[tuple[int, int, Prefix]]) -> Moves:
        """New sequences (id, known tokens, what they begin with), with blocks for all that they know. Returns copies as `reserve`."""
        for sequence_id, _, prefix in beginnings:  # all of them before any reserves, which may evict cached blocks
            for group, blocks in zip(self.groups, prefix.blocks, strict=True):
                group.adopt(sequence_id, blocks, prefix.num_tokens)
        copies: list[tuple[int, int]] = []
        for sequence_id, num_known, (prefix_blocks, num_tokens) in beginnings:
            for group, blocks in zip(self.groups, prefix_blocks, strict=True):
                copies += group.reserve(sequence_id, num_tokens, group.until(len(blocks), num_known))
        return tuple(copies)

    def cache(
        self, sequence_id: int, num_computed: int, token_ids: Sequence[int], digests: list[Digest], salt: str | None
    ) -> None:
        """Notes the full blocks among the first `num_computed` tokens of a sequence, for others to find."""
        if self.cached is not None:
            self.cached.add(sequence_id, num_computed, token_ids, digests, salt)

    def forget_cached(self) -> None:
        """Nothing is cached any more. Block tables stay as they are."""
        if self.cached is not None:
            self.cached.clear()

    # Swapping

    @property
    def can_swap(self) -> bool:
        """Whether there is a host pool."""
        return self.groups[0].swapped.pool is not None

    def is_swapped(self, sequence_id: int) -> bool:
        return sequence_id in self.groups[0].swapped

    @property
    def num_swapped(self) -> int:
        """Sequences."""
        return len(self.groups[0].swapped)

    def host_tables(self, sequence_id: int) -> list[list[int]]:
        """Host blocks of a swapped sequence, of each group."""
        return [group.swapped.table(sequence_id) for group in self.groups]

    def drop_swapped(self, sequence_id: int) -> None:
        for group in self.groups:
            group.swapped.drop(sequence_id)

    def can_swap_out(self, sequence_ids: Sequence[int]) -> bool:
        """Whether there are host blocks for all that these sequences hold."""
        return all(group.can_swap_out(sequence_ids) for group in self.groups)

    def swap_out(self, sequence_ids: Sequence[int]) -> Moves:
        """Moves the block tables of sequences to host blocks: see `BlockTables.swap_out`. Returns (block, host block) pairs."""
        return tuple(move for group in self.groups for move in group.swap_out(sequence_ids))

    def num_swap_in_blocks(self, spans: Sequence[Span]) -> Counts:
        """Free blocks that `swap_in` and then `reserve` would take, for the span of each sequence."""
        return tuple(group.num_swap_in_blocks(_cut(group, spans)) for group in self.groups)

    def swap_in(self, sequence_ids: Sequence[int]) -> Moves:
        """Moves them back. Returns (host block, block) pairs. Ask `num_swap_in_blocks` first."""
        return tuple(move for group in self.groups for move in group.swap_in(sequence_ids))

    # Pins

    def pin(self, pin_id: int, sequence_id: int, pin: Pin) -> None:
        """Keeps in place what a sequence has computed of its first tokens, under an id of its own, until `unpin`."""
        self.fork(sequence_id, pin_id)
        self.trim(pin_id, len(pin.token_ids))
        self.pins[pin_id] = pin

    def unpin(self, pin_id: int) -> None:
        del self.pins[pin_id]
        self.release(pin_id)

    @property
    def num_pinned_blocks(self) -> Counts:
        """Blocks that are in the table of a pin, each once."""
        return tuple(num_distinct(group.tables[pin_id].blocks for pin_id in self.pins) for group in self.groups)

    # For reports and tests

    def usage(self, computed: Mapping[int, int], known: Mapping[int, int] | None = None) -> MemorySplit:
        """What the pools hold, given how many tokens of each sequence are computed and, if more, known. Walks all tables."""
        known = computed if known is None else known
        tables = [
            (blocks, computed.get(sequence_id, 0), known.get(sequence_id, 0))
            for sequence_id, blocks in self._all_tables()
            if sequence_id not in self.pins
        ]
        pinned = [
            (blocks, len(self.pins[sequence_id].token_ids))
            for sequence_id, blocks in self._all_tables()
            if sequence_id in self.pins
        ]
        return split_memory(tables, self.block_size, self.num_free, pinned)

    def _all_tables(self) -> Iterator[tuple[int, list[int]]]:
        return ((sequence_id, table.blocks) for group in self.groups for sequence_id, table in group.tables.items())

    def check(self) -> None:
        """Asserts that pools, tables, pins and index are whole and agree."""
        for group in self.groups:
            group.check()
            assert group.sequence_ids == self.sequence_ids, "groups have other sequences"
            assert self.pins.keys() <= group.sequence_ids, "a pin has no block table"
        if self.cached is not None:
            self.cached.check()
        else:
            assert not any(group.pool.kept_blocks() for group in self.groups), "blocks are kept without an index"


def _cut(group: BlockTables, spans: Iterable[Span]) -> list[Span]:
    """What a group reserves of spans: where a window slides no more than a sequence ever needs at a time."""
    if group.sliding_window is None:
        return list(spans)
    return [(one, start, max(start + 1, group.until(group.num_passed(start), stop))) for one, start, stop in spans]


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
