"""Counts the requests in flight, so that a server that shuts down waits for these and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from jaxpage.errors import ShuttingDown


class InFlightRequests:
    """Counts the requests for the engine, from their headers to their last byte.

    It is used on one event loop.

    Attributes:
        is_closed: True once no further request may enter.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._number = 0
        self._nobody = asyncio.Event()
        self._nobody.set()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Counts a request while the context lasts.

        Raises:
            ShuttingDown: The counter is closed.
        """
        if self.is_closed:
            raise ShuttingDown("The server is shutting down")
        self._number += 1
        self._nobody.clear()
        try:
            yield
        finally:
            self._number -= 1
            if not self._number:
                self._nobody.set()

    async def wait_until_idle(self, timeout: float) -> bool:
        """Waits until all requests have ended, and returns whether they have within `timeout`."""
        try:
            await asyncio.wait_for(self._nobody.wait(), timeout)
        except TimeoutError:
            return False
        return True
