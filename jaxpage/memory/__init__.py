"""Who owns which KV block: a pool with reference counts, block tables, and an index of prefixes. Integers only; no device."""

from jaxpage.memory.block_manager import BlockManager, Counts, Pin, Prefix
from jaxpage.memory.block_pool import NULL_BLOCK, BlockPool, pool_ids
from jaxpage.memory.block_tables import BlockTables
from jaxpage.memory.memory_history import MemoryHistory, MemoryReport, MemorySample
from jaxpage.memory.memory_split import MemorySplit
from jaxpage.memory.prefix_index import CacheObserver, Entry, PrefixIndex

__all__ = [
    "NULL_BLOCK",
    "BlockManager",
    "BlockPool",
    "BlockTables",
    "CacheObserver",
    "Counts",
    "Entry",
    "MemoryHistory",
    "MemoryReport",
    "MemorySample",
    "MemorySplit",
    "Pin",
    "Prefix",
    "PrefixIndex",
    "pool_ids",
]
