"""Who owns which KV block: a pool with reference counts, and the block tables of all sequences. Integers only; no device."""

from jaxpage.memory.block_manager import BlockManager
from jaxpage.memory.block_pool import NULL_BLOCK, BlockPool
from jaxpage.memory.memory_split import MemorySplit

__all__ = ["NULL_BLOCK", "BlockManager", "BlockPool", "MemorySplit"]
