"""Raises the limit of open files to what the connections need, and logs briefly where it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import time
from typing import Any

logger = logging.getLogger(__name__)
_OTHERS = 128  # files of the process that are not connections
# Connections over the limit are accepted for a moment, to be answered or cut.
_PER_CONNECTION = 2
_OUT_OF_SOMETHING = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_SECONDS = 1.0  # the least time between two lines of the log


def room_for_connections(requested: int) -> int:
    """Raises the limit of open files as far as needed and allowed.

    Args:
        requested: The number of connections that the server may have.

    Returns:
        The number of connections that there is room for, at most `requested`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _PER_CONNECTION * requested + _OTHERS
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        # macOS refuses numbers above a second limit, which it does not report.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return requested
    room = max(1, (soft - _OTHERS) // _PER_CONNECTION)
    logger.warning(
        "max_connections is %d, not %d: the process may have %d files open (ulimit -n), and needs "
        "%d",
        room,
        requested,
        soft,
        needed,
    )
    return room


class Complaints:
    """Handles the errors that asyncio catches itself.

    Connections that cannot be accepted are logged at most once a second; all other errors go to
    asyncio's own handler.
    """

    def __init__(self) -> None:
        self._last = -_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs an error that asyncio has caught."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _OUT_OF_SOMETHING:
            loop.default_exception_handler(context)
        elif time.monotonic() - self._last >= _SECONDS:
            self._last = time.monotonic()
            logger.error("connections cannot be accepted: %s", error.strerror)
