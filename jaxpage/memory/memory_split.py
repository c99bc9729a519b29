"""What the slots of the pool hold, split the way figure 2 of the PagedAttention paper splits it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MemorySplit:
    """Slots of the pool, each counted once however many sequences share it; the four kinds add up to the usable pool."""

    token_slots: int  # hold the key and value of a token
    reserved_slots: int  # kept for tokens that are known but not computed yet
    internal_fragmentation_slots: int  # the rest of the blocks in use: no token is known for them
    free_slots: int
    shared_blocks: int  # blocks that more than one block table refers to

    @property
    def num_slots(self) -> int:
        return self.token_slots + self.reserved_slots + self.internal_fragmentation_slots + self.free_slots


def split_memory(
    tables: Iterable[tuple[Sequence[int], int, int]], block_size: int, num_free_blocks: int, shared_blocks: int
) -> MemorySplit:
    """The split of a pool whose block tables are given with the numbers of tokens (computed, known) of their sequences."""
    computed_of: dict[int, int] = {}
    known_of: dict[int, int] = {}
    for table, num_computed, num_known in tables:
        for index, block in enumerate(table):
            _raise_to(computed_of, block, min(max(num_computed - index * block_size, 0), block_size))
            _raise_to(known_of, block, min(max(num_known - index * block_size, 0), block_size))
    num_computed, num_known = sum(computed_of.values()), sum(known_of.values())
    return MemorySplit(
        token_slots=num_computed,
        reserved_slots=num_known - num_computed,
        internal_fragmentation_slots=len(known_of) * block_size - num_known,
        free_slots=num_free_blocks * block_size,
        shared_blocks=shared_blocks,
    )


def _raise_to(slots_of: dict[int, int], block: int, slots: int) -> None:
    slots_of[block] = max(slots_of.get(block, 0), slots)
