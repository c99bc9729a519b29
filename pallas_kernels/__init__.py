"""Implements paged attention for JAX: operations that read and write KV blocks.

A row finds its blocks through a block table. The package knows no engine and can be used alone.
The letters of shapes are: B rows (sequences of a
step), T query tokens of the stream (Q: of one row), N query heads, K key/value heads (G = N / K
query heads share one), H head width, P physical blocks, S slots per block, M blocks per block-table
row, C context positions. A *block* is a KV block; the part that a kernel works on at a time is a
*tile*.

Products with quantised weights are in `quantized_matmul`, and what kernel sets say of themselves in
`sets`.
"""

from pallas_kernels.arguments import Arguments
from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.block_copy import copy_blocks, copy_slots, gather_blocks, scatter_blocks
from pallas_kernels.kernel_set import Call, KernelSet
from pallas_kernels.kv_write import has_rotate_and_write, rotate_and_write, write_kv
from pallas_kernels.paged_attention import (
    attend_to_pages,
    paged_attention,
    pages_from_PSKH,
    write_and_attend,
)
from pallas_kernels.quantized_pages import is_quantized
from pallas_kernels.sets import BACKENDS, INTERPRETABLE_BACKENDS
from pallas_kernels.tiles import Tiles

__all__ = [
    "BACKENDS",
    "INTERPRETABLE_BACKENDS",
    "Arguments",
    "AttentionOptions",
    "Call",
    "KernelSet",
    "Tiles",
    "attend_to_pages",
    "copy_blocks",
    "copy_slots",
    "gather_blocks",
    "has_rotate_and_write",
    "is_quantized",
    "paged_attention",
    "pages_from_PSKH",
    "rotate_and_write",
    "scatter_blocks",
    "write_and_attend",
    "write_kv",
]
