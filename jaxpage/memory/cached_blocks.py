"""Which blocks hold prefixes that others may begin with: the index knows those of the first cache group, and the others' go with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from jaxpage.memory.block_pool import NULL_BLOCK
from jaxpage.memory.block_tables import BlockTables
from jaxpage.memory.invariants import check_cached
from jaxpage.memory.prefix_index import Digest, Parent, PrefixIndex


class CachedBlocks:
    """Prefixes over all cache groups. A hit holds in each of them: where a group sees a window, in the blocks that are in it.

    A block of a further group is found through the block of the first group that holds the same tokens, which were compared; so it is
    forgotten with it. Whose block is handed out anew first loses nothing but its own place.
    """

    def __init__(self, groups: Sequence[BlockTables], index: PrefixIndex) -> None:
        assert all(group.block_size == index.block_size for group in groups)
        self.index = index
        self._first, *self._further = groups
        self._beside: list[dict[int, int]] = [{} for _ in self._further]  # by block of the first group
        self._holder: list[dict[int, int]] = [{} for _ in self._further]  # the same the other way round
        self._first.reused = self._forget
        for place, group in enumerate(self._further):
            group.reused = partial(self._forget_beside, place)

    def find(self, token_ids: Sequence[int], digests: list[Digest], salt: str | None) -> tuple[list[int], ...]:
        """Blocks of each group that hold the longest prefix that all of them have, at least one token left out."""
        num_blocks = (len(token_ids) - 1) // self.index.block_size
        found = self.index.match(self.index.extend(digests, token_ids, salt, num_blocks)[:num_blocks], token_ids, salt)
        length = len(found)
        while length and not all(self._holds(place, found, length) for place in range(len(self._further))):
            length -= 1
        return (found[:length], *(self._blocks_beside(place, found[:length]) for place in range(len(self._further))))

    def _holds(self, place: int, found: list[int], length: int) -> bool:
        passed = self._further[place].num_passed(length * self.index.block_size)
        return all(block in self._beside[place] for block in found[passed:length])

    def _blocks_beside(self, place: int, found: list[int]) -> list[int]:
        passed = self._further[place].num_passed(len(found) * self.index.block_size)
        return [NULL_BLOCK] * passed + [self._beside[place][block] for block in found[passed:]]

    def add(
        self, sequence_id: int, num_computed: int, token_ids: Sequence[int], digests: list[Digest], salt: str | None
    ) -> None:
        """Notes the full blocks among the first `num_computed` tokens of a sequence.

        A block whose content is known from another block already is given up for that one, so that the blocks before a cached
        block are always the cached ones.
        """
        index, first, table, size = self.index, self._first, self._first.tables[sequence_id], self.index.block_size
        index.extend(digests, token_ids, salt, num_computed // size)
        for place in range(table.num_cached, num_computed // size):
            block, parent = table.blocks[place], table.blocks[place - 1] if place else salt
            if block == NULL_BLOCK:
                return  # it fell out of the window before it could be cached
            tokens = tuple(token_ids[place * size : (place + 1) * size])
            known = index.register(block, digests[place], parent, tokens)
            if known is None or (known != block and first.pool.ref_count(block) > 1):
                return  # the chain is broken, or a fork has the block too and would keep it behind another's
            if known == block:
                first.pool.keep(block)
            else:
                first.replace(sequence_id, place, known)
            for further in range(len(self._further)):
                self._add_beside(further, sequence_id, place, known)
            table.num_cached = place + 1

    def _add_beside(self, further: int, sequence_id: int, place: int, holder: int) -> None:
        group = self._further[further]
        block = group.tables[sequence_id].blocks[place]
        known = self._beside[further].get(holder)
        if block in (NULL_BLOCK, known):
            return
        if known is None:
            if not group.pool.is_kept(block):
                self._beside[further][holder], self._holder[further][block] = block, holder
                group.pool.keep(block)
        elif group.pool.ref_count(block) == 1:
            group.replace(sequence_id, place, known)

    @property
    def has_room(self) -> bool:
        """Whether a block of the first group is free that holds nothing."""
        return self._first.pool.num_free > self._first.pool.num_cached

    def restore(self, digest: Digest, parent: Parent, token_ids: tuple[int, ...]) -> int:
        """A free block, cached from now on with content that is not in the index and that the caller writes. Ask `has_room` first."""
        pool = self._first.pool
        block = pool.allocate()
        assert self.index.register(block, digest, parent, token_ids) == block, "the content is known already"
        pool.keep(block)
        pool.release(block)
        return block

    def clear(self) -> None:
        self.index.clear()
        for group in (self._first, *self._further):
            group.pool.forget()
            for table in group.tables.values():
                table.num_cached = 0
        for blocks in (*self._beside, *self._holder):
            blocks.clear()

    def _forget(self, block: int) -> None:
        """A block of the first group is handed out anew: what is behind it cannot be found either, nor what goes with those."""
        behind = self.index.forget(block)
        for one in behind:
            self._first.pool.unkeep(one)
        for place, group in enumerate(self._further):
            for one in (block, *behind):
                if (beside := self._beside[place].pop(one, None)) is not None:
                    del self._holder[place][beside]
                    group.pool.unkeep(beside)

    def _forget_beside(self, place: int, block: int) -> None:
        if (holder := self._holder[place].pop(block, None)) is not None:
            del self._beside[place][holder]

    def check(self) -> None:
        """Asserts that what is kept is what can be found."""
        first = self._first
        cached = {sequence_id: table.blocks[: table.num_cached] for sequence_id, table in first.tables.items()}
        check_cached(first.pool, self.index, cached, slides=first.sliding_window is not None)
        for place, group in enumerate(self._further):
            beside, holder = self._beside[place], self._holder[place]
            assert beside == {one: block for block, one in holder.items()}, "not one to one"
            assert sorted(holder) == group.pool.kept_blocks(), "kept blocks are those that can be found"
            assert all(one in self.index for one in beside), "a block is attached to one that is not in the index"
