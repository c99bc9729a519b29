"""Keeps the KV blocks of preempted sequences in host memory while others use the device."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int32]  # [n] host block ids
# [n, bytes of a block], as `pallas_kernels.gather_blocks` makes them
Contents = npt.NDArray[np.uint8]


class HostPages:
    """Holds a cache group's pages in host memory: one row of bytes for each block.

    Blocks 1 to num_blocks hold content; block 0 is the null block, for padding. Memory that was
    never written is not taken from the system. Ids are not checked here: the batch builder does
    that.
    """

    def __init__(self, num_blocks: int, block_bytes: int, directory: Path | None = None):
        """Reserves the blocks.

        Args:
            num_blocks: The number of blocks without the null block.
            block_bytes: The bytes of a block.
            directory: The place of a file with the blocks, of which the system keeps in memory what
                it has room for; nobody else sees the file, and it ends with the process. None keeps
                all blocks in memory.

        Raises:
            OSError: The disk has no room for the file.
        """
        shape = num_blocks + 1, block_bytes
        self._rows: Contents = (
            np.empty(shape, np.uint8) if directory is None else _map_file(shape, directory)
        )

    def store(self, blocks: Blocks, contents: Contents) -> None:
        """Writes contents into blocks."""
        self._rows[blocks] = contents

    def load(self, blocks: Blocks) -> Contents:
        """Returns a copy of the blocks' contents.

        A transfer to the device that is still under way then does not see what is stored next.
        """
        return self._rows[blocks]

    def close(self) -> None:
        """Gives the memory back."""
        self._rows = np.empty((0, 0), np.uint8)


def _map_file(shape: tuple[int, int], directory: Path) -> Contents:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryFile(dir=directory) as file:
        # Take the space now: a full disk would end the process at a write to mapped memory.
        os.posix_fallocate(file.fileno(), 0, shape[0] * shape[1])
        return np.memmap(file, np.uint8, "r+", shape=shape)
