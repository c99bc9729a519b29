"""The host's pool of KV blocks: where preempted sequences keep their keys and values while others use the device."""

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
    """A cache group's pages in host memory: one row of bytes per block.

    Blocks 1 .. num_blocks hold content; block 0 is the null block, for padding.

    Memory that was never written to is not taken from the system. Ids are not checked here: the batch builder does.
    """

    def __init__(self, num_blocks: int, block_bytes: int, directory: Path | None = None):
        """Reserves the blocks.

        directory: where a file has the blocks, of which the system keeps in memory what it has room for; None: all in memory.

        The file is seen by nobody else and ends with the process. Raises OSError where the disk has no room for it.
        """
        shape = num_blocks + 1, block_bytes
        self._rows: Contents = (
            np.empty(shape, np.uint8) if directory is None else _mapped(shape, directory)
        )

    def store(self, blocks: Blocks, contents: Contents) -> None:
        self._rows[blocks] = contents

    def load(self, blocks: Blocks) -> Contents:
        """A copy, so that a transfer to the device that is still under way does not see what is stored next."""
        return self._rows[blocks]

    def close(self) -> None:
        """Gives the memory back."""
        self._rows = np.empty((0, 0), np.uint8)


def _mapped(shape: tuple[int, int], directory: Path) -> Contents:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryFile(dir=directory) as file:
        # Taken now: a full disk would end the process at a write to mapped memory.
        os.posix_fallocate(file.fileno(), 0, shape[0] * shape[1])
        return np.memmap(file, np.uint8, "r+", shape=shape)
