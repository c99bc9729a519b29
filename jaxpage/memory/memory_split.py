"""Splits the slots of the pools by what they hold, and says what sharing saves.

The split is that of figure 2 of the PagedAttention paper, the saving that of its figure 15. The
last block of a sequence with 19 known tokens, 18 of them computed, in blocks of 4 slots:

    [   t16   |   t17   |    t18     |                            ]
       token     token     reserved     internal fragmentation
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxpage.memory.block_pool import NULL_BLOCK


@dataclass(frozen=True)
class MemorySplit:
    """The slots of the pools by kind; a slot counts once, however many sequences share it.

    The first four numbers add up to the usable slots.

    Attributes:
        token_slots: The slots that hold the key and value of a token.
        reserved_slots: The slots kept for tokens that are known but not computed yet.
        internal_fragmentation_slots: The other slots of used blocks: no token is known for them.
        free_slots: The slots of free blocks.
        shared_blocks: The blocks that more than one block table refers to.
        saved_blocks: The blocks that the sequences would take in addition if none were shared.
        unshared_blocks: The blocks that the sequences would take in all if none were shared.
    """

    token_slots: int
    reserved_slots: int
    internal_fragmentation_slots: int
    free_slots: int
    shared_blocks: int
    saved_blocks: int
    unshared_blocks: int

    @property
    def num_slots(self) -> int:
        """Returns how many slots the pools can hand out."""
        return sum(self.kinds.values())

    @property
    def kinds(self) -> dict[str, int]:
        """Returns the slots by the names that figure 2 gives to the kinds."""
        return {
            "token states": self.token_slots,
            "reserved": self.reserved_slots,
            "internal fragmentation": self.internal_fragmentation_slots,
            "free": self.free_slots,
        }

    @property
    def saved_by_sharing(self) -> float:
        """Returns the share of blocks, 0 to 1, that sharing saves, as figure 15 shows it."""
        return self.saved_blocks / self.unshared_blocks if self.unshared_blocks else 0.0


def split_memory(
    tables: Iterable[tuple[Sequence[int], int, int]],
    block_size: int,
    num_free_blocks: int,
    pinned: Iterable[tuple[Sequence[int], int]] = (),
) -> MemorySplit:
    """Returns the split of the pools by their block tables.

    The null block, which takes the place of a block that is out of a window, holds nothing.

    Args:
        tables: The block table of each sequence, with the numbers of its computed and known tokens.
        block_size: The slots of a block (S).
        num_free_blocks: The number of free blocks.
        pinned: The block table of each pin, with the number of tokens that it holds. Its blocks are
            used and can be shared, but a pin by itself saves nothing.
    """
    tables = list(tables)
    pinned = list(pinned)
    # Most blocks are full, and are not looked at one by one. The null block is left out below.
    full = {NULL_BLOCK}
    computed_slots: dict[int, int] = {}  # by block, of those that are not full in some table
    known_slots: dict[int, int] = {}
    held = ((blocks, num_tokens, num_tokens) for blocks, num_tokens in pinned)
    for blocks, num_computed, num_known in (*tables, *held):
        num_full = num_computed // block_size
        full.update(blocks[:num_full])
        for index in range(num_full, len(blocks)):
            start = index * block_size
            _raise_to(computed_slots, blocks[index], min(max(num_computed - start, 0), block_size))
            _raise_to(known_slots, blocks[index], min(max(num_known - start, 0), block_size))
    partly = known_slots.keys() - full
    num_full = len(full) - 1
    num_used = num_full + len(partly)
    num_computed = num_full * block_size + sum(computed_slots[block] for block in partly)
    num_known = num_full * block_size + sum(known_slots[block] for block in partly)
    block_lists = [blocks for blocks, *_ in tables]
    num_own = _num_entries(block_lists)
    return MemorySplit(
        token_slots=num_computed,
        reserved_slots=num_known - num_computed,
        internal_fragmentation_slots=num_used * block_size - num_known,
        free_slots=num_free_blocks * block_size,
        shared_blocks=_num_shared([*block_lists, *(blocks for blocks, _ in pinned)], num_used),
        # Each entry of a table would be a block of its own if nothing were shared.
        saved_blocks=num_own - len(set().union(*block_lists) - {NULL_BLOCK}),
        unshared_blocks=num_own,
    )


def _raise_to(slots: dict[int, int], block: int, num_slots: int) -> None:
    """Raises a block's number of slots if the table at hand fills more of them."""
    slots[block] = max(slots.get(block, 0), num_slots)


def _num_entries(tables: Iterable[Sequence[int]]) -> int:
    return sum(len(blocks) - blocks.count(NULL_BLOCK) for blocks in tables)


def _num_shared(tables: Sequence[Sequence[int]], num_distinct: int) -> int:
    if _num_entries(tables) == num_distinct:
        return 0
    counts = Counter(itertools.chain.from_iterable(tables))
    return sum(count > 1 for block, count in counts.items() if block != NULL_BLOCK)
