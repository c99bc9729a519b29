"""Allocates memory for weights in large pages, where the system has them.

Products of few rows wait for memory. In pages of 4 KiB a processor looks addresses up, and its
prefetching stops, every 4 KiB. Linux gives pages of 2 MiB to whole blocks of memory that ask for
them, so weights lie side by side in blocks of their own. A block is let go of with its last weight.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading

import numpy as np
from numpy.typing import DTypeLike

BYTES_OF_BLOCK = 1 << 26
ALIGNMENT = 64  # with which JAX takes an array without a copy


class Blocks:
    """Gives parts of a block of memory, one after the other, then of another block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block = np.empty(0, np.uint8)
        self._offset = 0

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Returns an array of this number of bytes, which are zero."""
        with self._lock:
            if self._offset + num_bytes > self._block.size:
                private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has small pages
                memory = mmap.mmap(-1, max(num_bytes, BYTES_OF_BLOCK), flags=private)
                with contextlib.suppress(OSError):  # a kernel that is built without large pages
                    memory.madvise(mmap.MADV_HUGEPAGE)
                # Only arrays refer to the memory, so it is given back with the last of them.
                self._block = np.frombuffer(memory, np.uint8)
                self._offset = 0
            part = self._block[self._offset : self._offset + num_bytes]
            self._offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            return part


_BLOCKS = Blocks()


def make_array(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Returns an array whose numbers are not set."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(shape, dtype)
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    return _BLOCKS.allocate(num_bytes).view(dtype).reshape(shape)


def return_freed_memory() -> None:
    """Gives the system what the C library keeps of freed memory for later, where it has a way.

    Weights that are no longer needed, since they are in panels, would stay part of the process.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
