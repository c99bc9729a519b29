"""Counts the references to physical blocks, and hands out the free ones."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable

NULL_BLOCK = 0  # takes the writes of padding; never handed out


def pool_ids(counts: Iterable[int]) -> list[range]:
    """Returns the block ids of several pools; no id but the null block's is in two of them.

    Args:
        counts: The number of blocks of each pool, the shared null block included.
    """
    ids: list[range] = []
    start = NULL_BLOCK + 1
    for count in counts:
        ids.append(range(start, start + count - 1))
        start = ids[-1].stop
    return ids


class BlockPool:
    """Holds the blocks from `first` to num_blocks - 1, each free or used with a reference count.

    A kept block has content that the prefix index can find. When it is free it can come back into
    use as it is, and it is handed out for new content only when no other block is free. Both kinds
    are handed out in the order in which they became free; of the kept ones this is the least
    recently used first. Every operation but `forget` takes constant time.

    Attributes:
        first: The id of the first block.
        num_blocks: The id after the last block.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        first: int = NULL_BLOCK + 1,
        free_order: Iterable[int] = (),
    ) -> None:
        """Makes a pool whose blocks are all free.

        Args:
            num_blocks: The id after the last block. For a single pool this is P, the null block
                included.
            first: The id of the first block; smaller ids belong to other pools.
            free_order: The blocks to hand out first, in this order; the others follow in ascending
                order.

        Raises:
            ValueError: The pool has no block, or `free_order` repeats a block or names one that
                does not exist.
        """
        if num_blocks <= first:
            reason = f"block {NULL_BLOCK} is the null block and is never handed out"
            raise ValueError(f"{num_blocks=} must be above {first}: {reason}")
        ordered = list(free_order)
        free = set(range(first, num_blocks)) - set(ordered)
        if len(ordered) + len(free) != num_blocks - first:
            span = f"between {first} and {num_blocks - 1}"
            raise ValueError(f"free_order={ordered} must name distinct blocks {span}")
        self.first = first
        self.num_blocks = num_blocks
        self._free = deque([*ordered, *sorted(free)])
        # The blocks that are free and kept, the least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        # By id. Those below `first` are of other pools, and stay as they are.
        self._is_kept = [False] * num_blocks
        self._ref_counts = [0] * num_blocks

    @property
    def num_usable(self) -> int:
        """Returns how many blocks can be handed out at all: all but the null block."""
        return self.num_blocks - self.first

    @property
    def num_free(self) -> int:
        """Returns how many blocks can be handed out now, the cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Returns how many free blocks keep their content until they are handed out."""
        return len(self._cached)

    def ref_count(self, block: int) -> int:
        """Returns how many block tables refer to the block; 0 if it is free."""
        return self._ref_counts[block]

    def is_kept(self, block: int) -> bool:
        """Returns whether the block's content is kept, so that nothing may write into it."""
        return self._is_kept[block]

    def is_writable(self, block: int) -> bool:
        """Returns whether the one sequence that refers to the block may write into it."""
        return self._ref_counts[block] == 1 and not self._is_kept[block]

    def allocate(self) -> int:
        """Takes a free block, which has one reference then; ask `num_free` first."""
        assert self._free or self._cached, "no free block: the caller did not ask num_free first"
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            self._is_kept[block] = False
        self._ref_counts[block] = 1
        return block

    def keep(self, block: int) -> None:
        """Keeps the content of a used block until the block is handed out for new content."""
        assert self._ref_counts[block] > 0, f"block {block} is not in use and cannot be kept"
        self._is_kept[block] = True

    def unkeep(self, block: int) -> None:
        """Keeps the content of a block no longer; if the block is free, it is like any other."""
        assert self._is_kept[block], f"block {block} is not kept"
        self._is_kept[block] = False
        if self._ref_counts[block] == 0:
            del self._cached[block]
            self._free.append(block)

    def refresh(self, block: int) -> None:
        """Makes a block the last of the free ones with content to be handed out, if it is free."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def share(self, block: int) -> None:
        """Adds a reference to a used block, or the first one to a cached block."""
        if self._ref_counts[block] == 0:
            assert self._is_kept[block], f"block {block} is not in use and cannot be shared"
            del self._cached[block]
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Removes a reference; a block without references is free."""
        assert self._ref_counts[block] > 0, f"block {block} is not in use and cannot be released"
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if self._is_kept[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def forget(self) -> None:
        """Keeps no content any longer; references stay as they are."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._is_kept = [False] * self.num_blocks

    def cached_blocks(self) -> list[int]:
        """Returns the free blocks whose content is kept, the next to be handed out first."""
        return list(self._cached)

    def kept_blocks(self) -> list[int]:
        """Returns the blocks whose content is kept, in use or free, in ascending order."""
        return list(itertools.compress(range(self.num_blocks), self._is_kept))

    def ref_counts(self) -> list[int]:
        """Returns the reference count of every block; the null block has none."""
        return self._ref_counts.copy()

    def check(self) -> None:
        """Asserts that every block but the null block is either free or referred to."""
        free = set(self._free)
        cached = set(self._cached)
        used = {block for block, count in enumerate(self._ref_counts) if count > 0}
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert min(self._ref_counts) >= 0, "a reference count is negative"
        assert not free & cached, f"blocks {free & cached} are free in two ways"
        assert cached == set(self.kept_blocks()) - used, "cached is what is kept and free"
        free |= cached
        assert not free & used, f"blocks {free & used} are free and in use"
        blocks = set(range(self.first, self.num_blocks))
        assert free | used == blocks, "a block is lost, or the null block is handed out"
