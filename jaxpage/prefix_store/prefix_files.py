"""Keeps full KV blocks as files, so that prefixes survive a restart (`prefix_cache_directory`).

A file holds one block: its keys and values, its tokens, and the digest of the block before it. A
file that cannot be read, is damaged or belongs to another block is counted and skipped; it never
fails a request.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import queue
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jaxpage.errors import ConfigError
from jaxpage.memory import words_of
from jaxpage.private_files import make_private

logger = logging.getLogger(__name__)

Contents = npt.NDArray[np.uint8]  # [bytes of a block]
_SUFFIX = ".safetensors"
# The name of a block's file, or of a temporary file that a process writes.
_NAME = re.compile(r"[0-9a-f]{64}\.(safetensors|\d+)")
_MAX_WRITE = 60.0  # seconds
_WAITING = 256  # the most blocks that wait to be written; more are dropped


class StoredBlock(NamedTuple):
    """Names a block of a sequence by its tokens and all tokens before them.

    Attributes:
        digest: The digest of all those tokens.
        before: The digest of the block before it; empty for the first block.
        token_ids: The tokens that the block depends on besides; see `PrefixIndex.content`.
    """

    digest: bytes
    before: bytes
    token_ids: tuple[int, ...]

    @property
    def words(self) -> npt.NDArray[np.int32]:
        """Returns the tokens as a file has them; see `words_of`."""
        return words_of(self.token_ids).view(np.int32)


@dataclass
class FileCounts:
    """Counts blocks since the start.

    Attributes:
        written: Blocks that were written to files.
        restored: Blocks that were read from files.
        skipped: Files that were damaged or had other contents.
        dropped: Blocks that could not be written, or not in time.
    """

    written: int = 0
    restored: int = 0
    skipped: int = 0
    dropped: int = 0


class PrefixFiles:
    """Writes files on a thread of its own, and deletes the least recently used ones first.

    Several processes may share a directory.

    Attributes:
        counts: The counts since the start.
    """

    def __init__(self, directory: Path, key: str, max_bytes: int):
        """Opens a directory.

        Args:
            directory: The user's own directory; it is made if it does not exist.
            key: A name for everything that a block depends on, other than its tokens: weights,
                types, layout.
            max_bytes: The most bytes of the files of all keys.

        Raises:
            ConfigError: The directory cannot be used.
        """
        self._directory_of_key = directory / key
        self._max_bytes = max_bytes
        try:
            make_private(self._directory_of_key)
            if directory.stat().st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to another user")
            files = _find_files(directory)
        except OSError as error:
            raise ConfigError(
                f"prefix_cache_directory {str(directory)!r} cannot be used: {error.strerror}"
            ) from None
        self.counts = FileCounts()
        self._lock = threading.Lock()  # guards the next three
        self._sizes = OrderedDict(files)
        self._num_bytes = sum(self._sizes.values())
        self._pending: set[bytes] = set()
        self._intact: set[bytes] = set()  # digests whose files were read or written here
        self._waiting: queue.Queue[tuple[StoredBlock, Contents] | None] = queue.Queue(_WAITING)
        self._writer = threading.Thread(target=self._write_all, name="prefix cache", daemon=True)
        self._writer.start()

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all files."""
        with self._lock:
            return self._num_bytes

    def has(self, digest: bytes) -> bool:
        """Returns whether the block has a file, or will have one soon."""
        with self._lock:
            return digest in self._pending or str(self._path(digest)) in self._sizes

    def read(self, block: StoredBlock) -> Contents | None:
        """Returns the contents of a block, or None if its file is missing or damaged."""
        contents = self._check(block)
        self.counts.restored += contents is not None
        return contents

    def skip_damaged(self, blocks: Iterable[StoredBlock]) -> None:
        """Deletes the damaged files of these blocks; each file is checked once."""
        for block in blocks:
            if block.digest not in self._intact:
                self._check(block)

    def _check(self, block: StoredBlock) -> Contents | None:
        path = self._path(block.digest)
        with self._lock:
            if str(path) not in self._sizes:
                return None
            self._sizes.move_to_end(str(path))
        try:
            # A link might lead to any file of the user.
            if not stat.S_ISREG(path.lstat().st_mode):
                raise ValueError("it is no regular file")
            with safe_open(path, framework="numpy") as file:
                about = file.metadata()
                token_ids = file.get_tensor("token_ids")
                contents: Contents = file.get_tensor("pages")
            if about != _about(block, contents) or token_ids.tolist() != block.words.tolist():
                raise ValueError("its contents are not those of this block")
            # The next start orders files by this time.
            os.utime(path)
        except FileNotFoundError:  # another process deleted it
            self._forget(path)
            return None
        except (OSError, ValueError, SafetensorError) as error:
            logger.warning("%s is skipped: %s", path, error)
            self.counts.skipped += 1
            self._forget(path)
            _delete(path)
            return None
        self._intact.add(block.digest)
        return contents

    def write(self, block: StoredBlock, contents: Contents) -> None:
        """Hands a block to the thread, which writes it unless too many blocks wait."""
        with self._lock:
            self._pending.add(block.digest)
        try:
            self._waiting.put_nowait((block, contents))
        except queue.Full:
            self._give_up(block)

    def close(self) -> None:
        """Waits until all waiting blocks are written."""
        self._waiting.put(None)
        self._writer.join()

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            block, contents = item
            path = self._path(block.digest)
            temporary = path.with_suffix(f".{os.getpid()}")
            tensors = {"pages": contents, "token_ids": block.words}
            written = save(tensors, _about(block, contents))
            try:
                temporary.write_bytes(written)
                # A process that reads the directory finds a whole file, or none.
                temporary.replace(path)
            except OSError as error:
                logger.warning(
                    "a block of the prefix cache cannot be written to %s: %s", path, error
                )
                _delete(temporary)
                self._give_up(block)
                continue
            with self._lock:
                # Another process that shares the directory may have written the block, too.
                self._num_bytes += len(written) - self._sizes.pop(str(path), 0)
                self._sizes[str(path)] = len(written)
                self._pending.discard(block.digest)
            self._intact.add(block.digest)
            self.counts.written += 1
            self._tidy()

    def _tidy(self) -> None:
        """Deletes the least recently used files until the rest fits."""
        with self._lock:
            taken = []
            while self._num_bytes > self._max_bytes and self._sizes:
                path, size = self._sizes.popitem(last=False)
                self._num_bytes -= size
                taken.append(path)
        for path in taken:
            _delete(Path(path))

    def _give_up(self, block: StoredBlock) -> None:
        self.counts.dropped += 1
        with self._lock:
            self._pending.discard(block.digest)

    def _forget(self, path: Path) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(str(path), 0)

    def _path(self, digest: bytes) -> Path:
        return self._directory_of_key / f"{digest.hex()}{_SUFFIX}"


def _find_files(directory: Path) -> list[tuple[str, int]]:
    """Returns the paths and sizes of all blocks, the least recently used first.

    Files of other names are ignored. Temporary files that a dead process left are deleted.
    """
    files = []
    for path in directory.glob("*/*"):
        about = path.lstat()
        if not _NAME.fullmatch(path.name) or not stat.S_ISREG(about.st_mode):
            continue
        if path.suffix == _SUFFIX:
            files.append((about.st_mtime, str(path), about.st_size))
        elif time.time() - about.st_mtime > _MAX_WRITE:
            _delete(path)
    return [(path, size) for _, path, size in sorted(files)]


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):  # the file is gone, or is a directory
        path.unlink()


def _about(block: StoredBlock, contents: Contents) -> dict[str, str]:
    """Returns the metadata of a block's file."""
    checksum = hashlib.blake2b(np.ascontiguousarray(contents).data, digest_size=16).hexdigest()
    return {"format": "jaxpage prefix block 1", "before": block.before.hex(), "blake2b": checksum}
