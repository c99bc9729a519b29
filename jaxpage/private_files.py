"""Makes directories and files that only this user may read, for users' texts."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal

from jaxpage.errors import ConfigError


def make_private(directory: Path) -> None:
    """Makes a directory that only this user may enter, or takes the rights of others away.

    A directory that is already private is not changed: it may be on a read-only file system.

    Raises:
        OSError: The directory cannot be made, belongs to another user, or is one for all users,
            such as /tmp.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    if status.st_mode & stat.S_ISVTX:
        raise PermissionError(errno.EPERM, "it is for all users: name a directory in it")
    if status.st_mode & 0o077:
        directory.chmod(0o700)


def lock_directory(directory: Path, setting: str) -> BinaryIO:
    """Makes a directory private, and returns its lock, which one process holds until it closes it.

    Args:
        directory: The directory.
        setting: The setting that names it, for errors.

    Raises:
        ConfigError: The directory cannot be used, or another server uses it.
    """
    try:
        make_private(directory)
        lock = open_private(directory / "lock", "wb")
    except OSError as error:
        raise ConfigError(f"{setting}: cannot use {directory}: {error.strerror}") from None
    try:
        # The system ends this lock with the process, however that ends, so that no stale lock is in
        # the way.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        reason = f"cannot use {directory}: {error.strerror}"
        if isinstance(error, BlockingIOError):
            reason = f"another server uses {directory}"
        raise ConfigError(f"{setting}: {reason}") from None
    return lock


def open_private(path: Path, mode: Literal["wb", "xb", "a+b"]) -> BinaryIO:
    """Opens a file as `open` does; one that is new can be read by this user alone."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))
