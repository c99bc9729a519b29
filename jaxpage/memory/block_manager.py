"""Keeps the block tables of every cache group in step, finds cached prefixes, and holds pins.

A model whose layers need different caches (full attention, sliding window, latent) has one cache
group for each kind. A sequence owns a block table in every group. An operation succeeds in all
groups if `has_room` or `fits` said yes before it:

    group 0 (full)      sequence 7: [ 3  9  4 11 ]     positions 0..63, blocks of 16 slots
    group 1 (window 32) sequence 7: [ 0  0 21 25 ]     0 is the null block: out of the window

A fork shares all blocks of its parent. Before one of the two writes, its block is replaced
(copy-on-write):

    parent  [ 5  8 ]──┐            child writes position 20          parent  [ 5  8 ]      8: 1
                      ├ 5: 2                  ──────────▶                                  5: 2
    child   [ 5  8 ]──┘ 8: 2                                         child   [ 5 12 ]     12: 1
                                                                     copy 8 to 12 before the step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpage.memory.block_pool import NULL_BLOCK
from jaxpage.memory.block_tables import BlockTables, Span
from jaxpage.memory.cached_blocks import CachedBlocks
from jaxpage.memory.memory_split import MemorySplit, split_memory
from jaxpage.memory.prefix_index import Digest, PrefixIndex
from jaxpage.memory.swapping import Moves, num_distinct

Counts = tuple[int, ...]  # numbers of blocks, one for each cache group


@dataclass(frozen=True)
class Pin:
    """A prefix whose blocks stay in place until it is unpinned.

    Attributes:
        token_ids: The tokens that its block tables hold.
        salt: The `Request.prefix_salt` of the requests that may use it.
    """

    token_ids: tuple[int, ...]
    salt: str | None


class BlockCounts(NamedTuple):
    """Holds how many blocks the pools of all groups have, and in which state.

    Attributes:
        num_usable: The blocks that can be handed out at all.
        num_free: Those that can be handed out now, the cached ones included.
        num_cached: The free ones that keep their content until they are handed out.
        num_pinned: The distinct blocks of pins.
        used_share: The used share, 0 to 1, of the fullest pool.
    """

    num_usable: int
    num_free: int
    num_cached: int
    num_pinned: int
    used_share: float


class Prefix(NamedTuple):
    """Blocks that other sequences filled, and that hold the first tokens of a new sequence.

    Attributes:
        blocks: A list for each cache group, all of one length; the null block takes the place
            of a block that is out of the window of its group.
        num_tokens: The number of tokens that the blocks hold.
    """

    blocks: tuple[list[int], ...]
    num_tokens: int


class BlockManager:
    """Operates on the `BlockTables` of all cache groups together.

    The first group is that of the layers that see the longest context. Its blocks are the ones in
    the prefix index; the blocks of the other groups with the same tokens are attached to them.
    Block ids are distinct across the pools of all groups, except for the null block.

    Attributes:
        groups: The block tables of each cache group.
        block_size: The slots of a block (S).
        pins: The pinned prefixes. The key is the id of the block tables that hold the pin; it is
            never that of a sequence.
        slides: True if a group has a sliding window.
        cached: The prefix cache; None where prefix caching is off.
    """

    def __init__(
        self,
        groups: Sequence[BlockTables],
        prefix_index: PrefixIndex | None = None,
    ) -> None:
        """Joins the cache groups.

        Args:
            groups: The block tables of each cache group.
            prefix_index: The index of cached prefixes; None switches prefix caching off.
        """
        self.groups = tuple(groups)
        self.block_size = self.groups[0].block_size
        self.pins: dict[int, Pin] = {}
        self.slides = any(group.sliding_window is not None for group in self.groups)
        self.cached = None if prefix_index is None else CachedBlocks(self.groups, prefix_index)

    @property
    def sequence_ids(self) -> KeysView[int]:
        """Returns the ids of all sequences and pins that have block tables, even empty ones."""
        return self.groups[0].sequence_ids

    @property
    def num_usable(self) -> int:
        """Returns how many blocks the pools of all groups can hand out at all."""
        return sum(group.pool.num_usable for group in self.groups)

    @property
    def num_free(self) -> int:
        """Returns how many blocks can be handed out now, the cached ones included."""
        return sum(group.pool.num_free for group in self.groups)

    @property
    def num_cached(self) -> int:
        """Returns how many free blocks keep their content until they are handed out."""
        return sum(group.pool.num_cached for group in self.groups)

    @property
    def used_share(self) -> float:
        """Returns the used share, 0 to 1, of the fullest pool."""
        return max(1 - group.pool.num_free / group.pool.num_usable for group in self.groups)

    @property
    def index(self) -> PrefixIndex | None:
        """Returns what finds cached blocks by their tokens; None where prefix caching is off."""
        return None if self.cached is None else self.cached.index

    def counts(self) -> BlockCounts:
        """Returns the numbers of blocks; this walks the tables of pins."""
        num_pinned = sum(self.num_pinned_blocks)
        return BlockCounts(
            self.num_usable, self.num_free, self.num_cached, num_pinned, self.used_share
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks hold this many tokens."""
        return self.groups[0].blocks_for(num_tokens)

    def max_blocks(self, num_tokens: int) -> Counts:
        """Returns the most blocks that a sequence of this length holds at a time, by group."""
        return tuple(group.max_blocks(num_tokens) for group in self.groups)

    def block_tables(self, sequence_id: int) -> tuple[tuple[int, ...], ...]:
        """Returns a sequence's block tables, one for each cache group."""
        return tuple([group.block_table(sequence_id) for group in self.groups])

    def is_used(self, block: int) -> bool:
        """Returns whether any block table of any group refers to this block."""
        return any(
            group.pool.first <= block < group.pool.num_blocks and group.pool.ref_count(block) > 0
            for group in self.groups
        )

    # Reserving: there is room in every group, or nothing is reserved in any.

    def can_write(self, sequence_id: int, position: int) -> bool:
        """Returns whether the sequence can write this position without a new block.

        This is the common case of a decoding sequence: the last block of 16 still has room.
        """
        # For one or two groups a list takes half the time of a generator, and every sequence of
        # every step asks.
        return all([group.can_write(sequence_id, position) for group in self.groups])

    def has_room(self, spans: Sequence[Span]) -> bool:
        """Returns whether there are blocks to call `reserve` for each of these spans in turn."""
        free = [group.pool.num_free for group in self.groups]
        needs = [group.num_new_blocks_together(_cut(group, spans)) for group in self.groups]
        return all(needed <= count for needed, count in zip(needs, free, strict=True))

    def fits(self, needed: Counts, spare: Callable[[int], int] = lambda num_usable: 0) -> bool:
        """Returns whether this many blocks are free in each group.

        Args:
            needed: The number of blocks for each group.
            spare: Gives the number of blocks that must remain free in a pool, from the number of
                blocks that the pool can hand out at all.
        """
        return all(
            count <= group.pool.num_free - spare(group.pool.num_usable)
            for count, group in zip(needed, self.groups, strict=True)
        )

    def reserve(self, sequence_id: int, start: int, stop: int) -> Moves:
        """Makes positions start to stop - 1 writable by this sequence alone; ask `has_room` first.

        A block that another sequence shares, or that the prefix cache can find, is replaced.

        In a group with a sliding window only as many of the positions are reserved as the sequence
        has blocks for.

        Returns:
            The copies (source block, destination block) that must happen before the step writes.

        Raises:
            CapacityError: There are too few free blocks. Groups before the one that lacks them have
                reserved already, so this is a mistake of a caller that did not ask.
            ValueError: The range cannot be reserved; see `BlockTables.reserve`.
        """
        copies: list[tuple[int, int]] = []
        for group in self.groups:
            ((_, _, end),) = _cut(group, [(sequence_id, start, stop)])
            copies += group.reserve(sequence_id, start, end)
        return tuple(copies)

    def slide(self, sequence_id: int, num_tokens: int) -> None:
        """Gives up the blocks that no token after the first `num_tokens` can see any more."""
        for group in self.groups:
            group.slide(sequence_id, num_tokens)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Makes a new sequence that shares every block of its parent; this takes no free block."""
        for group in self.groups:
            group.fork(parent_id, child_id)
        if self.cached is not None:
            self.cached.fork(parent_id, child_id)

    def trim(self, sequence_id: int, num_tokens: int) -> None:
        """Gives up the blocks after the first `num_tokens` positions."""
        for group in self.groups:
            group.trim(sequence_id, num_tokens)

    def release(self, sequence_id: int) -> None:
        """Gives up all blocks and forgets the sequence."""
        for group in self.groups:
            group.release(sequence_id)
        if self.cached is not None:
            self.cached.renew(sequence_id)

    @property
    def nothing(self) -> Prefix:
        """Returns the prefix of no tokens."""
        return Prefix(tuple([] for _ in self.groups), 0)

    def find(self, token_ids: Sequence[int], digests: list[Digest], salt: str | None) -> Prefix:
        """Returns the cached blocks that hold the longest prefix of these tokens.

        At least one token is left out, because a request needs the logits of its last token:

            tokens   [ t0 .. t15 | t16 .. t31 | t32 .. t47 ]     48 tokens, blocks of 16 slots
            hit      [   cached  |   cached   ]                  at most 32 of them

        The blocks may be in use or free. Call `begin` with them before anything else is allocated,
        because an allocation may hand out a free cached block.

        Args:
            token_ids: The tokens of the sequence.
            digests: The digests of its first blocks, as far as they are known. The list grows, so
                that no block is hashed twice.
            salt: `Request.prefix_salt`.
        """
        if self.cached is None:
            return self.nothing
        blocks = self.cached.find(token_ids, digests, salt)
        return Prefix(blocks, len(blocks[0]) * self.block_size)

    def find_pinned(self, token_ids: Sequence[int], salt: str | None) -> Prefix:
        """Returns the blocks of the pin that has the longest prefix in common with these tokens.

        The last token is left out, as in `find`; so is the last token of the pin where its content
        depends on the token after it (see `PrefixIndex`). The last block may be partly filled where
        the whole pin is found or where the tokens end within it; a sequence that writes to it
        copies it first.
        """
        max_length = self.nothing
        following = self._num_following
        for pin_id, pin in self.pins.items():
            if pin.salt != salt:
                continue
            num_pinned = len(pin.token_ids)
            num_common = _num_common(token_ids, pin.token_ids, min(num_pinned, len(token_ids)))
            num_tokens = min(num_common - following, len(token_ids) - 1)
            if num_tokens < min(num_pinned - following, len(token_ids) - 1):
                # The block in which they differ has other tokens of the pin after those in common.
                num_tokens = num_tokens // self.block_size * self.block_size
            if num_tokens <= max_length.num_tokens:
                continue
            num_blocks = self.blocks_for(num_tokens)
            prefix = [group.tables[pin_id].blocks[:num_blocks] for group in self.groups]
            passed = (group.num_passed(num_tokens) for group in self.groups)
            # A pin whose window has slid may lack a block that the new sequence sees.
            if all(NULL_BLOCK not in blocks[p:] for blocks, p in zip(prefix, passed, strict=True)):
                max_length = Prefix(tuple(prefix), num_tokens)
        return max_length

    def num_to_begin(self, beginnings: Sequence[tuple[int, Prefix]]) -> Counts:
        """Returns how many free blocks `begin` takes, for each group.

        A cached block counts once, and only if no sequence uses it yet.

        Args:
            beginnings: The number of known tokens and the prefix of each new sequence.
        """
        counts = []
        for index, group in enumerate(self.groups):
            num_new = 0
            revived: set[int] = set()
            for num_known, prefix in beginnings:
                blocks = prefix.blocks[index]
                num_new += self.blocks_for(group.until(len(blocks), num_known)) - len(blocks)
                # A partly filled last block is copied, because another sequence uses it.
                num_new += prefix.num_tokens % self.block_size > 0
                revived.update(blocks[group.num_passed(prefix.num_tokens) :])
            counts.append(num_new + group.num_revived(revived))
        return tuple(counts)

    def begin(self, beginnings: Sequence[tuple[int, int, Prefix]]) -> Moves:
        """Makes new sequences, each with blocks for all tokens that it knows.

        Args:
            beginnings: The id, the number of known tokens and the prefix of each new sequence.

        Returns:
            The copies that must happen before the step writes, as `reserve` returns them.
        """
        # Adopt every prefix before reserving anything: reserving may evict cached blocks that a
        # later prefix needs.
        for sequence_id, _, prefix in beginnings:
            for group, blocks in zip(self.groups, prefix.blocks, strict=True):
                group.adopt(sequence_id, blocks, prefix.num_tokens)
        copies: list[tuple[int, int]] = []
        for sequence_id, num_known, (prefix_blocks, num_tokens) in beginnings:
            for group, blocks in zip(self.groups, prefix_blocks, strict=True):
                stop = group.until(len(blocks), num_known)
                copies += group.reserve(sequence_id, num_tokens, stop)
        return tuple(copies)

    def num_to_cache(self, num_computed: int) -> int:
        """Returns how many blocks of a sequence the prefix index takes.

        Args:
            num_computed: The number of the sequence's tokens that are computed.
        """
        return (num_computed - self._num_following) // self.block_size

    @property
    def _num_following(self) -> int:
        return 0 if self.cached is None else self.cached.index.num_following

    def cache(
        self,
        sequence_id: int,
        num_computed: int,
        token_ids: Sequence[int],
        digests: list[Digest],
        salt: str | None,
    ) -> None:
        """Adds the full blocks among a sequence's computed tokens to the prefix index.

        A block whose content is cached already is given up for the cached one, so the sequence's
        block tables may change.

        Args:
            sequence_id: The sequence.
            num_computed: The number of its tokens that are computed.
            token_ids: Its tokens.
            digests: The digests of its first blocks, as far as they are known; the list grows.
            salt: `Request.prefix_salt`.
        """
        if self.cached is not None:
            self.cached.add(sequence_id, num_computed, token_ids, digests, salt)

    def forget_cached(self) -> None:
        """Empties the prefix cache; see `CachedBlocks.clear`. Block tables stay as they are."""
        if self.cached is not None:
            self.cached.clear()

    def is_swapped(self, sequence_id: int) -> bool:
        """Returns whether a sequence's blocks are in host memory."""
        return sequence_id in self.groups[0].swapped

    @property
    def num_swapped(self) -> int:
        """Returns how many sequences are swapped out."""
        return len(self.groups[0].swapped)

    def host_tables(self, sequence_id: int) -> list[list[int]]:
        """Returns the tables of host blocks of a swapped sequence, one for each group."""
        return [group.swapped.table(sequence_id) for group in self.groups]

    def drop_swapped(self, sequence_id: int) -> None:
        """Forgets a swapped sequence and frees its host blocks."""
        for group in self.groups:
            group.swapped.drop(sequence_id)
        if self.cached is not None:
            self.cached.renew(sequence_id)

    def can_swap_out(self, sequence_ids: Sequence[int]) -> bool:
        """Returns whether there are host blocks for everything that these sequences hold."""
        return all(group.can_swap_out(sequence_ids) for group in self.groups)

    def swap_out(self, sequence_ids: Sequence[int]) -> Moves:
        """Moves sequences to host blocks; see `BlockTables.swap_out`.

        Returns:
            The pairs (block, host block) that must be moved before the step writes.
        """
        return tuple(move for group in self.groups for move in group.swap_out(sequence_ids))

    def num_swap_in_blocks(self, spans: Sequence[Span]) -> Counts:
        """Returns how many free blocks `swap_in` and then `reserve` take for spans, by group."""
        return tuple(group.num_swap_in_blocks(_cut(group, spans)) for group in self.groups)

    def swap_in(self, sequence_ids: Sequence[int]) -> Moves:
        """Moves swapped sequences back; ask `num_swap_in_blocks` first.

        Returns:
            The pairs (host block, block) that must be moved before the step writes.
        """
        return tuple(move for group in self.groups for move in group.swap_in(sequence_ids))

    def pin(self, pin_id: int, sequence_id: int, pin: Pin) -> None:
        """Keeps the first blocks of a sequence in place until `unpin`.

        Args:
            pin_id: An id for the pin, which is neither that of a sequence nor of another pin.
            sequence_id: The sequence whose first blocks hold the prefix.
            pin: The prefix.
        """
        # A pin is block tables of its own, so blocks stay when the sequence ends.
        self.fork(sequence_id, pin_id)
        self.trim(pin_id, len(pin.token_ids))
        self.pins[pin_id] = pin

    def unpin(self, pin_id: int) -> None:
        """Gives up a pin and its blocks."""
        del self.pins[pin_id]
        self.release(pin_id)

    def lose_pages(self) -> None:
        """Forgets all pins and the prefix cache, because what was in the blocks is gone."""
        # A copy, because `unpin` takes from it.
        for pin_id in list(self.pins):
            self.unpin(pin_id)
        self.forget_cached()

    @property
    def num_pinned_blocks(self) -> Counts:
        """Returns how many distinct blocks are in the tables of pins, for each group."""
        counts = []
        for group in self.groups:
            counts.append(num_distinct(group.tables[pin_id].blocks for pin_id in self.pins))
        return tuple(counts)

    @property
    def room_next_to_pins(self) -> Counts:
        """Returns how many blocks of each group can be handed out while the pins stay in place."""
        counts = zip(self.groups, self.num_pinned_blocks, strict=True)
        return tuple(group.pool.num_usable - num_pinned for group, num_pinned in counts)

    def usage(
        self,
        computed: Mapping[int, int],
        known: Mapping[int, int] | None = None,
    ) -> MemorySplit:
        """Returns how the slots of the pools are used, as the PagedAttention paper splits them.

        This walks all block tables.

        Args:
            computed: The number of computed tokens of each sequence.
            known: The number of known tokens of each sequence; None for the computed ones.
        """
        known = computed if known is None else known
        tables: list[tuple[list[int], int, int]] = []
        pinned: list[tuple[list[int], int]] = []
        for group in self.groups:
            for key, table in group.tables.items():
                if key in self.pins:
                    pinned.append((table.blocks, len(self.pins[key].token_ids)))
                else:
                    tables.append((table.blocks, computed.get(key, 0), known.get(key, 0)))
        return split_memory(tables, self.block_size, self.num_free, pinned)

    def check(self) -> None:
        """Asserts the invariants of pools, tables, pins and index, and that they agree."""
        for group in self.groups:
            group.check()
            assert group.sequence_ids == self.sequence_ids, "groups have other sequences"
            assert self.pins.keys() <= group.sequence_ids, "a pin has no block table"
        if self.cached is not None:
            self.cached.check()
        else:
            is_kept = any(group.pool.kept_blocks() for group in self.groups)
            assert not is_kept, "blocks are kept without an index"


def _cut(group: BlockTables, spans: Iterable[Span]) -> list[Span]:
    """Returns the parts of the spans that a group reserves.

    Where a window slides, a sequence never holds more blocks than the window and one step need,
    and at least the first position of a span is reserved.
    """
    if group.sliding_window is None:
        return list(spans)
    cut: list[Span] = []
    for sequence_id, start, stop in spans:
        end = group.until(group.num_passed(start), stop)
        cut.append((sequence_id, start, max(start + 1, end)))
    return cut


def _num_common(first: Sequence[int], second: Sequence[int], maximum: int) -> int:
    """Returns how many leading tokens are equal, at most `maximum`.

    The search bisects over slices, because Python compares slices fast.
    """
    low = 0
    high = maximum
    while low < high:
        middle = (low + high + 1) // 2
        if tuple(first[low:middle]) == tuple(second[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
