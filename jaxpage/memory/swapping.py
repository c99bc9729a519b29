"""Keeps block tables in host memory: where the blocks of swapped sequences lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Sequence

from jaxpage.memory.block_pool import NULL_BLOCK, BlockPool
from jaxpage.memory.invariants import check_references

Moves = tuple[tuple[int, int], ...]  # (block of the one pool, block of the other)


def num_distinct(tables: Iterable[Sequence[int]]) -> int:
    """Returns how many blocks the tables refer to; a block that several share counts once."""
    return len({block for table in tables for block in table} - {NULL_BLOCK})


def move(
    tables: Iterable[Sequence[int]],
    allocate: Callable[[], int],
    share: Callable[[int], None],
) -> tuple[list[list[int]], Moves]:
    """Makes the same tables over another pool.

    A block that several tables share is moved once, and is shared in the other pool, too.

    Args:
        tables: The block tables of some sequences.
        allocate: Takes a block of the other pool.
        share: Adds a reference to a block of the other pool.

    Returns:
        The new tables, and the pairs (old block, new block) that must be moved.
    """
    new_blocks: dict[int, int] = {}  # by old block
    copies: list[list[int]] = []
    for table in tables:
        copy: list[int] = []
        for block in table:
            if block == NULL_BLOCK:
                copy.append(NULL_BLOCK)
                continue
            if block in new_blocks:
                share(new_blocks[block])
            else:
                new_blocks[block] = allocate()
            copy.append(new_blocks[block])
        copies.append(copy)
    return copies, tuple(new_blocks.items())


class HostTables:
    """Holds the block tables of swapped sequences over a pool of host blocks.

    The tables have the order and the sharing that the blocks had on the device.

    Attributes:
        pool: The pool of host blocks; None where nothing can be swapped.
    """

    def __init__(self, pool: BlockPool | None) -> None:
        """Begins without swapped sequences."""
        self.pool = pool
        self._tables: dict[int, list[int]] = {}  # the key is a sequence id

    def __contains__(self, sequence_id: int) -> bool:
        """Returns whether a sequence is swapped out."""
        return sequence_id in self._tables

    def __len__(self) -> int:
        """Returns how many sequences are swapped out."""
        return len(self._tables)

    @property
    def sequence_ids(self) -> KeysView[int]:
        """Returns the ids of the swapped sequences."""
        return self._tables.keys()

    def table(self, sequence_id: int) -> list[int]:
        """Returns the host blocks of a swapped sequence in order of position."""
        return self._tables[sequence_id]

    def has_room(self, tables: Iterable[Sequence[int]]) -> bool:
        """Returns whether there are free host blocks for everything that these tables hold."""
        return self.pool is not None and num_distinct(tables) <= self.pool.num_free

    def store(self, sequence_ids: Sequence[int], tables: Sequence[Sequence[int]]) -> Moves:
        """Takes in sequences with their block tables; ask `has_room` first.

        Returns:
            The pairs (block, host block) that must be moved.
        """
        assert self.pool is not None
        copies, moves = move(tables, self.pool.allocate, self.pool.share)
        self._tables.update(zip(sequence_ids, copies, strict=True))
        return moves

    def drop(self, sequence_id: int) -> None:
        """Forgets a sequence, and frees the host blocks that no other sequence shares."""
        assert self.pool is not None
        for block in self._tables.pop(sequence_id):
            if block != NULL_BLOCK:
                self.pool.release(block)

    def check(self) -> None:
        """Asserts that the reference counts of the pool are exactly the entries of the tables."""
        if self.pool is None:
            assert not self._tables, "sequences are swapped without a host pool"
            return
        check_references(self.pool, self._tables)
