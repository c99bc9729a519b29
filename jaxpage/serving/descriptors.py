"""Sees that the process may have as many files open as the server may have connections, and that it says so briefly where it may not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import time
from typing import Any

logger = logging.getLogger(__name__)
_OTHERS = 128  # files of the process that are no connections
_PER_CONNECTION = 2  # as many again are taken for a moment, to be answered or cut
_OUT_OF_SOMETHING = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_SECONDS = 1.0  # between two lines


def room_for_connections(wanted: int) -> int:
    """Raises the limit of open files as far as that is needed and allowed. Returns how many connections there is room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _PER_CONNECTION * wanted + _OTHERS
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        # macOS has a limit beyond the one that it tells
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    room = max(1, (soft - _OTHERS) // _PER_CONNECTION)
    logger.warning(
        "max_connections is %d, not %d: the process may have %d files open (ulimit -n), and needs %d",
        room,
        wanted,
        soft,
        needed,
    )
    return room


class Complaints:
    """asyncio's handler of what nobody handles. Connections that cannot be accepted are a line a second at most."""

    def __init__(self) -> None:
        self._last = -_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _OUT_OF_SOMETHING:
            loop.default_exception_handler(context)
        elif time.monotonic() - self._last >= _SECONDS:
            self._last = time.monotonic()
            logger.error("connections cannot be accepted: %s", error.strerror)
