"""Finds the cached prefix of a sequence in all cache groups, and notes what can be found.

The prefix index knows the blocks of the first group. A block of another group with the same tokens
is attached to the block of the first, and a hit needs only those that are in the group's window:

    tokens               [ t0 .. t15 | t16 .. t31 | t32 .. t47 ]   a hit of 48 tokens
    group 0 (full)       [     3     |     9      |     4      ]   blocks of the index
    group 1 (window 16)  [     0     |     21     |     25     ]   21 is attached to 9, 25 to 4
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from jaxpage.memory.block_pool import NULL_BLOCK
from jaxpage.memory.block_tables import BlockTables
from jaxpage.memory.invariants import check_cached
from jaxpage.memory.prefix_index import Digest, Parent, PrefixIndex


class CachedBlocks:
    """Keeps prefixes over all cache groups.

    The tokens of a block of the first group were compared, so those of an attached block are known.
    A block of the first group that is forgotten takes the attached blocks along. An attached block
    that is handed out for new content loses nothing but its own place.

    Attributes:
        index: The prefix index, over the blocks of the first group.
    """

    def __init__(self, groups: Sequence[BlockTables], index: PrefixIndex) -> None:
        """Has the groups tell of each block that they allocate.

        Args:
            groups: The block tables of each cache group.
            index: An empty index.
        """
        assert all(group.block_size == index.block_size for group in groups)
        self.index = index
        self._first, *self._others = groups
        # For each of the other groups: its attached block by block of the first group, and back.
        self._attached: list[dict[int, int]] = [{} for _ in self._others]
        self._holders: list[dict[int, int]] = [{} for _ in self._others]
        # The sequences that had blocks when all prefixes were forgotten.
        self._old: set[int] = set()
        self._first.reused = self._forget
        for number, group in enumerate(self._others):
            group.reused = partial(self._detach, number)

    def find(
        self,
        token_ids: Sequence[int],
        digests: list[Digest],
        salt: str | None,
    ) -> tuple[list[int], ...]:
        """Returns the blocks of the longest prefix that all groups have, a list for each group.

        At least one token is left out. The arguments are those of `BlockManager.find`.
        """
        num_blocks = (len(token_ids) - 1) // self.index.block_size
        known_digests = self.index.extend(digests, token_ids, salt, num_blocks)[:num_blocks]
        blocks = self.index.match(known_digests, token_ids, salt)
        numbers = range(len(self._others))
        # A shorter prefix has other blocks in the window, so it may hold where the longer one does
        # not.
        while blocks and not all(self._has_attached(number, blocks) for number in numbers):
            blocks.pop()
        return (blocks, *(self._find_attached_blocks(number, blocks) for number in numbers))

    def _has_attached(self, number: int, blocks: list[int]) -> bool:
        """Returns whether another group has all blocks of a prefix that are in its window."""
        passed = self._num_passed(number, blocks)
        return all(block in self._attached[number] for block in blocks[passed:])

    def _find_attached_blocks(self, number: int, blocks: list[int]) -> list[int]:
        """Returns another group's blocks of a prefix, the null block where one has passed."""
        passed = self._num_passed(number, blocks)
        return [NULL_BLOCK] * passed + [self._attached[number][block] for block in blocks[passed:]]

    def _num_passed(self, number: int, blocks: list[int]) -> int:
        return self._others[number].num_passed(len(blocks) * self.index.block_size)

    def add(
        self,
        sequence_id: int,
        num_computed: int,
        token_ids: Sequence[int],
        digests: list[Digest],
        salt: str | None,
    ) -> None:
        """Adds the full blocks among the first `num_computed` tokens of a sequence.

        A sequence that had blocks at the last `clear` adds none.

        A block whose content another block holds already is given up for that one, so that the
        blocks before a cached block are always the cached ones. The tokens that a block depends on
        must be computed, too; see `PrefixIndex`.

        Args:
            sequence_id: The sequence.
            num_computed: The number of its tokens that are computed.
            token_ids: Its tokens.
            digests: The digests of its first blocks; the list grows.
            salt: `Request.prefix_salt`.
        """
        if sequence_id in self._old:
            return
        index = self.index
        first = self._first
        table = first.tables[sequence_id]
        size = index.block_size
        num_full = (num_computed - index.num_following) // size
        index.extend(digests, token_ids, salt, num_full)
        for block_index in range(table.num_cached, num_full):
            block = table.blocks[block_index]
            parent = table.blocks[block_index - 1] if block_index else salt
            if block == NULL_BLOCK:
                return  # the block fell out of the window before it could be cached
            content = index.content(token_ids, block_index)
            if block in index and index.entry(block).token_ids != content:
                return  # a fork has the block, too, and another token after it
            registered = index.register(block, digests[block_index], parent, content)
            if registered is None:
                return  # the block before it is not in the index any more
            if registered == block:
                first.pool.keep(block)
            elif first.pool.ref_count(block) > 1:
                return  # a fork has the block, too, and would keep it after the block of another
            else:
                first.replace(sequence_id, block_index, registered)
            for number in range(len(self._others)):
                self._attach(number, sequence_id, block_index, registered)
            table.num_cached = block_index + 1

    def _attach(self, number: int, sequence_id: int, index: int, holder: int) -> None:
        """Attaches another group's block of a sequence to a block of the first group."""
        group = self._others[number]
        block = group.tables[sequence_id].blocks[index]
        known = self._attached[number].get(holder)
        if block in (NULL_BLOCK, known):
            return
        if known is None:
            # A fork may have attached it to another block: each has one holder.
            if not group.pool.is_kept(block):
                self._attached[number][holder] = block
                self._holders[number][block] = holder
                group.pool.keep(block)
        elif group.pool.ref_count(block) == 1:
            group.replace(sequence_id, index, known)

    @property
    def has_room(self) -> bool:
        """Returns whether the first group has a free block without content."""
        return self._first.pool.num_free > self._first.pool.num_cached

    def restore(self, digest: Digest, parent: Parent, token_ids: tuple[int, ...]) -> int:
        """Returns a free block that is cached from now on; the caller writes its content.

        Ask `has_room` first.

        Args:
            digest: The digest of the content, which is not in the index.
            parent: The block before it, which is in the index; the salt if there is none.
            token_ids: The `content` of the block.
        """
        pool = self._first.pool
        block = pool.allocate()
        registered = self.index.register(block, digest, parent, token_ids)
        assert registered == block, "the content is known already"
        pool.keep(block)
        # Free, and with content: it is the last of the cached blocks to be handed out.
        pool.release(block)
        return block

    def refresh(self, prefix: Sequence[int]) -> None:
        """Makes a prefix the most recently used one; its last block is handed out first."""
        for block in reversed(prefix):
            self._first.pool.refresh(block)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Notes a sequence that shares every block of its parent."""
        if parent_id in self._old:
            self._old.add(child_id)

    def renew(self, sequence_id: int) -> None:
        """Notes that a sequence has given up its blocks, on the device and on the host."""
        self._old.discard(sequence_id)

    def clear(self) -> None:
        """Forgets all prefixes, and those that sequences have computed so far.

        Block tables stay as they are.
        """
        self._old = {*self._first.sequence_ids, *self._first.swapped.sequence_ids}
        self.index.clear()
        for group in (self._first, *self._others):
            group.pool.forget()
            for table in group.tables.values():
                table.num_cached = 0
        for blocks in (*self._attached, *self._holders):
            blocks.clear()

    def _forget(self, block: int) -> None:
        """Forgets a block of the first group that is handed out for new content.

        The blocks after it cannot be found any more either, nor those attached to any of them.
        """
        after = self.index.forget(block)
        for forgotten in after:
            self._first.pool.unkeep(forgotten)
        for number, group in enumerate(self._others):
            for forgotten in (block, *after):
                if (attached := self._attached[number].pop(forgotten, None)) is not None:
                    del self._holders[number][attached]
                    group.pool.unkeep(attached)

    def _detach(self, number: int, block: int) -> None:
        """Forgets a block of another group that is handed out for new content."""
        if (holder := self._holders[number].pop(block, None)) is not None:
            del self._attached[number][holder]

    def check(self) -> None:
        """Asserts that the kept blocks are those that can be found."""
        first = self._first
        cached = {key: table.blocks[: table.num_cached] for key, table in first.tables.items()}
        check_cached(first.pool, self.index, cached, slides=first.sliding_window is not None)
        for number, group in enumerate(self._others):
            attached = self._attached[number]
            holders = self._holders[number]
            inverse = {holder: block for block, holder in holders.items()}
            assert attached == inverse, "attached blocks and holders are not one to one"
            assert sorted(holders) == group.pool.kept_blocks(), "a kept block cannot be found"
            is_known = all(holder in self.index for holder in attached)
            assert is_known, "a block is attached to one that is not in the index"
