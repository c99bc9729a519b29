"""Counts the least that a call must move and compute, from its shapes alone.

A time is judged by the slower of the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pallas_kernels.quantized_pages import is_quantized
from tools.lab.kernel_lab.kernel_cases import first_visible, tree_mask
from tools.lab.kernel_lab.specs import Spec

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}
SCALE_BYTES = 4


@dataclass(frozen=True)
class Work:
    """Holds the least bytes and operations of a call.

    Attributes:
        kv_bytes: The keys, values and scales that some query token sees, once for each row.
        query_bytes: The queries that are read and the outputs that are written.
        table_bytes: The block table's entries for those blocks.
        flops: The two matrix products over what each query token sees.
    """

    kv_bytes: int
    query_bytes: int
    table_bytes: int
    flops: int

    @property
    def num_bytes(self) -> int:
        """Returns all bytes that are moved."""
        return self.kv_bytes + self.query_bytes + self.table_bytes


@dataclass(frozen=True)
class Ceilings:
    """Holds what was measured on this GPU.

    Attributes:
        copied: Bytes per second of a large copy, read and written.
        read: Bytes per second of a large sum.
        matmul: FLOP/s of a large bfloat16 product.
    """

    copied: float
    read: float
    matmul: float

    @property
    def bandwidth(self) -> float:
        """Returns the larger of the two measured bandwidths."""
        return max(self.copied, self.read)

    def min_seconds(self, work: Work) -> float:
        """Returns the least time that this work can take."""
        return max(work.num_bytes / self.bandwidth, work.flops / self.matmul)

    def bound(self, work: Work) -> str:
        """Returns whether "memory" or "compute" limits this work."""
        return (
            "memory" if work.num_bytes / self.bandwidth >= work.flops / self.matmul else "compute"
        )


def work(spec: Spec) -> Work:
    """Counts the work of a call of this spec; a row without queries needs nothing."""
    rows = [row for row in range(len(spec.contexts)) if spec.queries[row]]
    positions = sum(spec.contexts[row] - first_visible(spec, row) for row in rows)
    vector_bytes = spec.head_dim * _BYTES[spec.page_dtype] + (
        SCALE_BYTES if is_quantized(spec.page_dtype) else 0
    )
    blocks = sum(
        -(-spec.contexts[row] // spec.block_size) - first_visible(spec, row) // spec.block_size
        for row in rows
    )
    return Work(
        kv_bytes=2 * positions * spec.num_kv_heads * vector_bytes,
        query_bytes=2 * sum(spec.queries) * spec.num_heads * spec.head_dim * _BYTES[spec.dtype],
        table_bytes=4 * blocks,
        flops=4 * spec.num_heads * spec.head_dim * sum(_pairs(spec, row) for row in rows),
    )


def _pairs(spec: Spec, row: int) -> int:
    """Returns the number of pairs of a query token and a position that it sees."""
    context, queries = spec.contexts[row], spec.queries[row]
    if spec.tree:
        return queries * (context - queries) + int(tree_mask(queries).sum())
    seen_Q = np.arange(context - queries + 1, context + 1, dtype=np.int64)
    return int(
        seen_Q.sum()
        if spec.sliding_window is None
        else np.minimum(seen_Q, spec.sliding_window).sum()
    )
