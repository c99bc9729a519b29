"""Allocates contiguous slots in powers of two, as the PagedAttention paper's Orca baselines do."""

from __future__ import annotations


class BuddyAllocator:
    """Hands out chunks of 2^k slots, each at a multiple of its size.

    The smallest free chunk that is large enough, the lowest first, is halved until it is as small
    as it can be. A chunk that comes back is joined with its other half whenever that half is free:

        16 slots, allocate(3):   [ 4 used | 4 free |    8 free     ]
        free(0):                 [            16 free              ]

    A pool whose size is no power of two begins as one chunk for each bit of its size.
    """

    def __init__(self, num_slots: int) -> None:
        """Makes an empty pool.

        Raises:
            ValueError: There is no slot.
        """
        if num_slots < 1:
            raise ValueError(f"{num_slots=} must be at least 1")
        self.num_slots = num_slots
        self._sizes: dict[int, int] = {}  # sizes of the chunks in use, by their first slots
        # First slots of the free chunks, by the logarithm of their size.
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    @property
    def num_free(self) -> int:
        """Returns how many slots are free."""
        return sum(len(starts) << order for order, starts in enumerate(self._free))

    @property
    def largest(self) -> int:
        """Returns the size of the largest chunk of an empty pool."""
        return 1 << (self.num_slots.bit_length() - 1)

    def allocate(self, num_slots: int) -> int | None:
        """Returns the first slot of a chunk that holds this many slots.

        None is returned if there is no such chunk, however many slots are free in smaller ones.

        Raises:
            ValueError: Fewer than one slot is asked for.
        """
        if num_slots < 1:
            raise ValueError(f"{num_slots=} must be at least 1")
        expected = (num_slots - 1).bit_length()
        order = next(
            (order for order in range(expected, len(self._free)) if self._free[order]), None
        )
        if order is None:
            return None
        start = min(self._free[order])
        self._free[order].remove(start)
        for smaller in range(expected, order):
            self._free[smaller].add(start + (1 << smaller))
        self._sizes[start] = 1 << expected
        return start

    def free(self, start: int) -> None:
        """Takes a chunk back.

        Raises:
            KeyError: No chunk in use begins at this slot.
        """
        order = self._sizes.pop(start).bit_length() - 1
        while (buddy := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)
