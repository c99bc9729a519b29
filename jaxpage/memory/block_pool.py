"""The physical blocks: which are free, and how many block tables refer to each of the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

NULL_BLOCK = 0  # takes the writes of padding; never handed out


class BlockPool:
    """Blocks 1 .. num_blocks - 1, each free or used with a reference count. Every operation takes constant time.

    Free blocks are handed out in the order in which they came back, so that content stays in place as long as it can.
    """

    def __init__(self, num_blocks: int, *, free_order: Iterable[int] = ()) -> None:
        """
        Args:
            num_blocks: P, the null block included.
            free_order: blocks to hand out first, in this order; the others follow ascending.

        Raises:
            ValueError: there is no block beside the null block, or `free_order` repeats one or names one that does not exist.
        """
        if num_blocks < 2:
            raise ValueError(
                f"{num_blocks=} must be at least 2: block {NULL_BLOCK} is the null block and is never handed out"
            )
        first = list(free_order)
        rest = set(range(NULL_BLOCK + 1, num_blocks)) - set(first)
        if len(first) + len(rest) != num_blocks - 1:
            raise ValueError(f"free_order={first} must name distinct blocks between 1 and {num_blocks - 1}")
        self.num_blocks = num_blocks
        self._free = deque([*first, *sorted(rest)])
        self._ref_counts = [0] * num_blocks

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out at all: every block but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, block: int) -> int:
        """How many block tables refer to the block; 0 when it is free."""
        return self._ref_counts[block]

    def allocate(self) -> int:
        """A free block, now with one reference. Ask `num_free` first."""
        assert self._free, "no free block: the caller did not ask num_free first"
        block = self._free.popleft()
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a used block."""
        assert self._ref_counts[block] > 0, f"block {block} is not in use and cannot be shared"
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """One reference less; at none the block is free."""
        assert self._ref_counts[block] > 0, f"block {block} is not in use and cannot be released"
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._free.append(block)

    def check(self) -> None:
        """Asserts that every block but the null block is either free or referred to, and none is both."""
        free = set(self._free)
        used = {block for block, count in enumerate(self._ref_counts) if count > 0}
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert min(self._ref_counts) >= 0, "a reference count is negative"
        assert not free & used, f"blocks {free & used} are free and in use"
        assert free | used == set(range(NULL_BLOCK + 1, self.num_blocks)), (
            "a block is lost, or the null block is handed out"
        )
