"""Moves blocks and slots in the pool, and out of it and back: `api` chooses, `xla` defines, `triton` moves all layers in few launches."""

from pallas_kernels.block_copy.api import copy_blocks, copy_slots, gather_blocks, scatter_blocks

__all__ = ["copy_blocks", "copy_slots", "gather_blocks", "scatter_blocks"]
