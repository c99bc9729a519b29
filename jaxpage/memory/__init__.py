"""Decides which sequence owns which KV block.

A block holds the keys and values of `block_size` tokens. This room counts references to blocks,
keeps the block tables of sequences, and finds the blocks of cached prefixes. It works on integers
only and never sees a device. Other rooms take:

    BlockManager   keeps the block tables of all cache groups in step
    Pin, Prefix    a prefix that stays in place; blocks that hold a sequence's first tokens
    Counts         numbers of blocks, one for each cache group
    BlockTables    keeps the block tables of one cache group
    window_blocks  says how many blocks a sequence needs where a window slides
    BlockPool      counts the references to blocks, and hands out the free ones
    NULL_BLOCK     is the block that takes the writes of padding
    pool_ids       gives the block ids of several pools
    PrefixIndex    finds blocks by the tokens that they hold
    CachedBlocks   extends the index to all cache groups
    Entry, Parent  what a block of the index holds, and the block before it
    CacheObserver  is told what can be found
    MemorySplit    says what the slots of the pools hold
    MemorySample, MemoryHistory, MemoryReport  say what they held over time
"""

from jaxpage.memory.block_manager import BlockManager, Counts, Pin, Prefix
from jaxpage.memory.block_pool import NULL_BLOCK, BlockPool, pool_ids
from jaxpage.memory.block_tables import BlockTables, window_blocks
from jaxpage.memory.cached_blocks import CachedBlocks
from jaxpage.memory.memory_history import MemoryHistory, MemoryReport, MemorySample
from jaxpage.memory.memory_split import MemorySplit
from jaxpage.memory.prefix_index import CacheObserver, Entry, Parent, PrefixIndex

__all__ = [
    "NULL_BLOCK",
    "BlockManager",
    "BlockPool",
    "BlockTables",
    "CacheObserver",
    "CachedBlocks",
    "Counts",
    "Entry",
    "MemoryHistory",
    "MemoryReport",
    "MemorySample",
    "MemorySplit",
    "Parent",
    "Pin",
    "Prefix",
    "PrefixIndex",
    "pool_ids",
    "window_blocks",
]
