"""Block tables in host memory: where the blocks of swapped sequences lie, over a pool of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jaxpage.memory.block_pool import NULL_BLOCK, BlockPool
from jaxpage.memory.invariants import check_references

Moves = tuple[tuple[int, int], ...]  # (block of the one pool, block of the other)


def num_distinct(tables: Iterable[Sequence[int]]) -> int:
    """Blocks that the tables refer to, each once."""
    return len({block for table in tables for block in table} - {NULL_BLOCK})


def moved(
    tables: Iterable[Sequence[int]], allocate: Callable[[], int], share: Callable[[int], None]
) -> tuple[list[list[int]], Moves]:
    """The same tables over another pool, and what has to be moved: a block that tables share moves once and is shared there."""
    place: dict[int, int] = {}
    copies: list[list[int]] = []
    for table in tables:
        copy: list[int] = []
        for block in table:
            if block == NULL_BLOCK:
                copy.append(NULL_BLOCK)
                continue
            if block in place:
                share(place[block])
            else:
                place[block] = allocate()
            copy.append(place[block])
        copies.append(copy)
    return copies, tuple(place.items())


class HostTables:
    """The swapped sequences. They keep the order and the sharing that their blocks had in the pool of the device."""

    def __init__(self, pool: BlockPool | None) -> None:
        """pool: of host blocks; None where nothing can be swapped."""
        self.pool = pool
        self._tables: dict[int, list[int]] = {}

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    def table(self, sequence_id: int) -> list[int]:
        return self._tables[sequence_id]

    def has_room(self, tables: Iterable[Sequence[int]]) -> bool:
        return self.pool is not None and num_distinct(tables) <= self.pool.num_free

    def store(self, sequence_ids: Sequence[int], tables: Sequence[Sequence[int]]) -> Moves:
        """Takes sequences in. Ask `has_room` first. Returns (block, host block) pairs to move."""
        assert self.pool is not None
        copies, moves = moved(tables, self.pool.allocate, self.pool.share)
        self._tables.update(zip(sequence_ids, copies, strict=True))
        return moves

    def drop(self, sequence_id: int) -> None:
        """Forgets a sequence and frees what is its alone."""
        assert self.pool is not None
        for block in self._tables.pop(sequence_id):
            if block != NULL_BLOCK:
                self.pool.release(block)

    def check(self) -> None:
        """Asserts that the host pool's reference counts are exactly the entries of the tables."""
        if self.pool is None:
            assert not self._tables, "sequences are swapped without a host pool"
            return
        check_references(self.pool, self._tables)
