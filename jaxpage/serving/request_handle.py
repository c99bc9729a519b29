"""A request in the engine, as the event loop that submitted it sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol, TypeVar

from jaxpage.engine.admission import PreparedRequest
from jaxpage.engine.reporting import Reporter
from jaxpage.errors import JaxpageError
from jaxpage.outputs import RequestOutput

_Error = TypeVar("_Error", bound=JaxpageError)


def copy_error(error: _Error) -> _Error:
    """The same error for another who gets it: raising it would lengthen one traceback for all."""
    return type(error)(*error.args)


class HandleClient(Protocol):
    """What a request needs of the engine's loop. Both may be called from any thread."""

    def want(self, submitted: RequestHandle) -> None: ...

    def end(self, submitted: RequestHandle) -> None: ...


class RequestHandle:
    """A request that the engine has. It is read on the event loop that submitted it; `cancel` may come from any thread.

    Between the threads is one slot and no queue: the engine makes the next delta when the last one was taken, of all that came since.
    A slow reader costs nothing but the place of its request.
    """

    def __init__(self, loop: HandleClient, request: PreparedRequest, *, stream: bool, deadline: float) -> None:
        self.request_id = ""  # once the engine has it
        self.request = request
        self.stream = stream
        self.deadline = deadline
        self.home = asyncio.get_running_loop()
        self._loop = loop
        self._waiting: asyncio.Future[RequestOutput] | None = None  # this and the error: on the event loop
        self._error: JaxpageError | None = None
        self.reporter: Reporter | None = None  # from here on: on the engine's thread
        self.is_wanted = self.is_updated = self.is_over = False

    async def whole(self) -> RequestOutput:
        """All of it, once it has finished. Who gives up waiting has ended the request.

        Raises DeadlineExceeded, EngineFailed or ShuttingDown.
        """
        try:
            return await self.next_delta()
        finally:
            self.cancel()

    def next_delta(self) -> asyncio.Future[RequestOutput]:
        """What is new of a stream since the one before, which was taken; the last one has finish reasons. Or all of it at the end.

        Raises what `whole` raises.
        """
        self._waiting = self.home.create_future()
        try:
            if self._error is not None:
                raise copy_error(self._error)
            self._loop.want(self)
        except JaxpageError as error:
            _fail(self._waiting, error)
        return self._waiting

    def cancel(self) -> None:
        """Ends the request before the engine's next step; its blocks are free. Of one that has ended nothing is left to do."""
        self._loop.end(self)

    def arrived(self, update: RequestOutput | JaxpageError) -> None:
        """On the event loop: what the engine sent. An error comes without being asked for, and stays."""
        if isinstance(update, JaxpageError):
            self._error = update
        if self._waiting is None or self._waiting.done():
            return
        if isinstance(update, JaxpageError):
            _fail(self._waiting, update)
        else:
            self._waiting.set_result(update)


Update = tuple[RequestHandle, RequestOutput | JaxpageError]


def send(updates: Iterable[Update]) -> None:
    """Wakes each event loop once, for all that is new of its requests."""
    by_home: defaultdict[asyncio.AbstractEventLoop, list[Update]] = defaultdict(list)
    for one, item in updates:
        by_home[one.home].append((one, item))
    for home, items in by_home.items():
        with contextlib.suppress(RuntimeError):  # the event loop is closed: no handler waits any more
            home.call_soon_threadsafe(_arrive, items)


def _fail(future: asyncio.Future[RequestOutput], error: JaxpageError) -> None:
    future.set_exception(error)
    future.exception()  # seen: asyncio logs no complaint if no handler waits for it any more


def _arrive(updates: list[Update]) -> None:
    for one, item in updates:
        one.arrived(item)
