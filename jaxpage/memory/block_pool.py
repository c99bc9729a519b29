"""The physical blocks: which are free, which of those still hold something, and how many tables refer to each of the others."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable

NULL_BLOCK = 0  # takes the writes of padding; never handed out


def pool_ids(counts: Iterable[int]) -> list[range]:
    """Of pools with so many blocks each, the null block included, which all of them share: no other id is in two of them."""
    ids, start = [], NULL_BLOCK + 1
    for count in counts:
        ids.append(range(start, start + count - 1))
        start = ids[-1].stop
    return ids


class BlockPool:
    """Blocks from `first` to num_blocks - 1, each free or used with a reference count. Every operation but `forget` takes constant time.

    A block that is kept has content that others may want: once free it can come back into use as it is, and it is handed
    out anew only when no other block is free. Both kinds are handed out in the order in which they came back, so that content
    stays in place as long as it can: of the kept ones, the least recently used first.
    """

    def __init__(self, num_blocks: int, *, first: int = NULL_BLOCK + 1, free_order: Iterable[int] = ()) -> None:
        """
        Args:
            num_blocks: behind the last block. Of the only pool P, the null block included.
            first: of the blocks: those before are another pool's.
            free_order: blocks to hand out first, in this order; the others follow ascending.

        Raises:
            ValueError: there is no block beside the null block, or `free_order` repeats one or names one that does not exist.
        """
        if num_blocks <= first:
            raise ValueError(
                f"{num_blocks=} must be above {first}: block {NULL_BLOCK} is the null block and is never handed out"
            )
        ordered = list(free_order)
        rest = set(range(first, num_blocks)) - set(ordered)
        if len(ordered) + len(rest) != num_blocks - first:
            raise ValueError(f"free_order={ordered} must name distinct blocks between {first} and {num_blocks - 1}")
        self.first = first
        self.num_blocks = num_blocks
        self._free = deque([*ordered, *sorted(rest)])
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and kept, the least recently used first
        self._kept = [False] * num_blocks
        self._ref_counts = [0] * num_blocks

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out at all: every block but the null block."""
        return self.num_blocks - self.first

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, the cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content is kept until they are handed out."""
        return len(self._cached)

    def ref_count(self, block: int) -> int:
        """How many block tables refer to the block; 0 when it is free."""
        return self._ref_counts[block]

    def is_kept(self, block: int) -> bool:
        """Whether the block's content is kept, in use or free: nothing may be written into it."""
        return self._kept[block]

    def is_writable(self, block: int) -> bool:
        """Whether who refers to the block may write into it: nothing else refers to it, and its content is not kept."""
        return self._ref_counts[block] == 1 and not self._kept[block]

    def allocate(self) -> int:
        """A free block, now with one reference and without content. Ask `num_free` first."""
        assert self._free or self._cached, "no free block: the caller did not ask num_free first"
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            self._kept[block] = False
        self._ref_counts[block] = 1
        return block

    def keep(self, block: int) -> None:
        """From now on the content of a used block is kept, until it is handed out anew."""
        assert self._ref_counts[block] > 0, f"block {block} is not in use and cannot be kept"
        self._kept[block] = True

    def unkeep(self, block: int) -> None:
        """The content of a block that is kept is wanted no more; if the block is free, it is like any other."""
        assert self._kept[block], f"block {block} is not kept"
        self._kept[block] = False
        if self._ref_counts[block] == 0:
            del self._cached[block]
            self._free.append(block)

    def share(self, block: int) -> None:
        """One more reference to a used block, or the first to a cached one."""
        if self._ref_counts[block] == 0:
            assert self._kept[block], f"block {block} is not in use and cannot be shared"
            del self._cached[block]
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """One reference less; at none the block is free."""
        assert self._ref_counts[block] > 0, f"block {block} is not in use and cannot be released"
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if self._kept[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def forget(self) -> None:
        """No content is kept any more; references stay as they are."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._kept = [False] * self.num_blocks

    def cached_blocks(self) -> list[int]:
        """The free blocks whose content is kept, the first to be handed out anew first."""
        return list(self._cached)

    def kept_blocks(self) -> list[int]:
        """The blocks whose content is kept, in use or free, ascending."""
        return list(itertools.compress(range(self.num_blocks), self._kept))

    def ref_counts(self) -> list[int]:
        """Of every block, the null block included, which has none."""
        return self._ref_counts.copy()

    def check(self) -> None:
        """Asserts that every block but the null block is either free or referred to, and none is both."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, count in enumerate(self._ref_counts) if count > 0}
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert min(self._ref_counts) >= 0, "a reference count is negative"
        assert not free & cached, f"blocks {free & cached} are free in two ways"
        assert cached == {block for block, kept in enumerate(self._kept) if kept} - used, (
            "cached is what is kept and free"
        )
        free |= cached
        assert not free & used, f"blocks {free & used} are free and in use"
        assert free | used == set(range(self.first, self.num_blocks)), (
            "a block is lost, or the null block is handed out"
        )
