"""Decides which sequence owns which KV block.

A block holds the keys and values of `block_size` tokens. This room counts references to blocks,
keeps the block tables of sequences, and finds the blocks of cached prefixes. It works on integers
only and never sees a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.lazy import open_door

if TYPE_CHECKING:
    from jaxpage.memory.block_manager import (
        BlockCounts,  # holds how many blocks there are, and in which state
        BlockManager,  # keeps the block tables of all cache groups in step
        Counts,  # are numbers of blocks, one for each cache group
        Pin,  # is a prefix that stays in place
        Prefix,  # has the blocks that hold a sequence's first tokens
    )
    from jaxpage.memory.block_pool import (
        BlockPool,  # counts the references to blocks, and hands out the free ones
        pool_ids,  # gives the block ids of several pools
    )
    from jaxpage.memory.block_tables import (
        BlockTables,  # keeps the block tables of one cache group
        window_blocks,  # says how many blocks a sequence needs where a window slides
    )
    from jaxpage.memory.cached_blocks import (
        CachedBlocks,  # extends the prefix index to all cache groups
    )
    from jaxpage.memory.memory_history import (
        MemoryHistory,  # says what the slots held over time
        MemoryReport,  # sums up what the slots held over time
        MemorySample,  # says what the slots held at one time
    )
    from jaxpage.memory.memory_split import (
        MemorySplit,  # says what the slots of the pools hold
    )
    from jaxpage.memory.prefix_index import (
        CacheObserver,  # is told what can be found in the prefix index
        Entry,  # is what a block of the prefix index holds
        Parent,  # is the block before an entry of the prefix index
        PrefixIndex,  # finds blocks by the tokens that they hold
        has_vectors,  # says whether a block's content has any
        words_of,  # gives the content of a block as words of 32 bits
    )

__getattr__, __dir__ = open_door(__name__)
