"""What the slots of the pool hold, split the way figure 2 of the PagedAttention paper splits it, and what sharing saves (figure 15)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxpage.memory.block_pool import NULL_BLOCK


@dataclass(frozen=True)
class MemorySplit:
    """Slots of the pool, each counted once however many sequences share it; the four kinds add up to the usable pool."""

    token_slots: int  # hold the key and value of a token
    reserved_slots: int  # kept for tokens that are known but not computed yet
    internal_fragmentation_slots: int  # the rest of the blocks in use: no token is known for them
    free_slots: int
    shared_blocks: int  # blocks that more than one block table refers to
    saved_blocks: int  # that the sequences would take beyond those they have, if each had its own
    unshared_blocks: int  # that the sequences would take in all, if each had its own

    @property
    def num_slots(self) -> int:
        return sum(self.kinds.values())

    @property
    def kinds(self) -> dict[str, int]:
        """The slots by the names that figure 2 gives them."""
        return {
            "token states": self.token_slots,
            "reserved": self.reserved_slots,
            "internal fragmentation": self.internal_fragmentation_slots,
            "free": self.free_slots,
        }

    @property
    def saved_by_sharing(self) -> float:
        """Blocks saved by sharing / blocks without sharing, 0 to 1: what figure 15 shows."""
        return self.saved_blocks / self.unshared_blocks if self.unshared_blocks else 0.0


def split_memory(
    tables: Iterable[tuple[Sequence[int], int, int]],
    block_size: int,
    num_free_blocks: int,
    pinned: Iterable[tuple[Sequence[int], int]] = (),
) -> MemorySplit:
    """The split of a pool by its block tables. The null block stands for what fell out of a window: it holds nothing.

    Args:
        tables: of sequences, each with the numbers of its tokens that are computed and known.
        pinned: block tables that belong to no sequence, with the numbers of tokens that they hold. They are in use and can be shared, but
            nothing is saved by them alone.
    """
    tables, pinned = list(tables), list(pinned)
    full = {NULL_BLOCK}  # of the others every slot holds a token; they are most, and are not looked at one by one
    computed_of: dict[int, int] = {}
    known_of: dict[int, int] = {}
    for blocks, num_computed, num_known in (*tables, *((blocks, held, held) for blocks, held in pinned)):
        num_full = num_computed // block_size
        full.update(blocks[:num_full])
        for index in range(num_full, len(blocks)):
            _raise_to(computed_of, blocks[index], min(max(num_computed - index * block_size, 0), block_size))
            _raise_to(known_of, blocks[index], min(max(num_known - index * block_size, 0), block_size))
    partly = known_of.keys() - full
    full_slots = (len(full) - 1) * block_size
    token_slots = full_slots + sum(computed_of[block] for block in partly)
    known_slots = full_slots + sum(known_of[block] for block in partly)
    num_used = len(full) - 1 + len(partly)
    own = [blocks for blocks, *_ in tables]
    num_own = _num_entries(own)
    return MemorySplit(
        token_slots=token_slots,
        reserved_slots=known_slots - token_slots,
        internal_fragmentation_slots=num_used * block_size - known_slots,
        free_slots=num_free_blocks * block_size,
        shared_blocks=_num_shared([*own, *(blocks for blocks, _ in pinned)], num_used),
        saved_blocks=num_own - len(set().union(*own) - {NULL_BLOCK}),
        unshared_blocks=num_own,
    )


def _raise_to(slots_of: dict[int, int], block: int, slots: int) -> None:
    slots_of[block] = max(slots_of.get(block, 0), slots)


def _num_entries(tables: Iterable[Sequence[int]]) -> int:
    return sum(len(blocks) - blocks.count(NULL_BLOCK) for blocks in tables)


def _num_shared(tables: Sequence[Sequence[int]], num_distinct: int) -> int:
    if _num_entries(tables) == num_distinct:
        return 0
    counts = Counter(itertools.chain.from_iterable(tables))
    return sum(count > 1 for block, count in counts.items() if block != NULL_BLOCK)
