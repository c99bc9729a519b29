"""Defines the driver for event loops, for `AsyncLLM` and the server."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from jaxpage.assembly import Built
from jaxpage.device import Embedder
from jaxpage.driver import Driver, Handle, HeldPrefix, Update, check_streamable, copy_error
from jaxpage.engine import Engine, PreparedRequest
from jaxpage.errors import JaxpageError
from jaxpage.memory import MemoryReport
from jaxpage.outputs import RequestOutput, TokenPooling

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Home:
    """Holds the event loop that reads requests; it is woken once for all updates of a turn."""

    loop: asyncio.AbstractEventLoop

    def __call__(self, updates: list[Update]) -> None:
        # A closed event loop raises RuntimeError, and nobody waits on it.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(_arrive, updates)


class AwaitedHandle(Handle):
    """Follows a request that is read on the event loop that submitted it.

    The next delta is made when the reader asks for it, and has everything since the last one. Any
    thread may call `cancel`.
    """

    def __init__(
        self, driver: Driver, request: PreparedRequest, *, stream: bool, deadline: float
    ) -> None:
        self._home = asyncio.get_running_loop()
        super().__init__(
            request, _Home(self._home), is_stream=stream, is_pushed=False, deadline=deadline
        )
        self._turns = driver.turns
        self._waiting: asyncio.Future[RequestOutput] | None = None
        self._error: JaxpageError | None = None

    async def whole(self) -> RequestOutput:
        """Returns the whole output when the request has finished.

        A reader that stops waiting ends the request.

        Raises:
            DeadlineExceeded: Its time was over.
            EngineFailed: The engine has failed.
            ShuttingDown: The engine is shutting down.
            WeightsReplaced: The model gets other weights.
        """
        try:
            return await self.next_delta()
        finally:
            self.cancel()

    def next_delta(self) -> asyncio.Future[RequestOutput]:
        """Returns the next delta of a stream, or the whole output of an ordinary request.

        The last delta has finish reasons. The future has the errors of `whole`.
        """
        self._waiting = self._home.create_future()
        try:
            if self._error is not None:
                raise copy_error(self._error)
            self._turns.want(self)
        except JaxpageError as error:
            _fail(self._waiting, error)
        return self._waiting

    def cancel(self) -> None:
        """Ends the request before the engine's next step, unless it has ended already."""
        self._turns.end([self])

    def arrived(self, update: RequestOutput | JaxpageError) -> None:
        """Takes an update of the driver. An error comes without being asked for, and is kept."""
        if isinstance(update, JaxpageError):
            self._error = update
        if self._waiting is None or self._waiting.done():
            return
        if isinstance(update, JaxpageError):
            _fail(self._waiting, update)
        else:
            self._waiting.set_result(update)


class AsyncPinnedPrefix(HeldPrefix):
    """Keeps a prefix in place until `release()` or the end of `async with`; see `HeldPrefix`."""

    async def release(self) -> None:
        """Frees the blocks that no running request shares. A second call does nothing."""
        if not self.released:
            await asyncio.wrap_future(self._driver.unpin(self._pin_id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class AsyncDriver(Driver):
    """Drives an engine for event loops, which await its methods.

    Each of them raises EngineFailed or ShuttingDown after the driver's end.

    Attributes:
        built: The engine, with what the server knows of its model.
        num_places: The most requests at a time.
    """

    def __init__(
        self,
        built: Built,
        *,
        max_queued_requests: int = 256,
        request_timeout_seconds: float | None = None,
        stalled_after_seconds: float = 60.0,
    ) -> None:
        """Makes a driver that is not started.

        Args:
            built: The engine, with what the server knows of its model.
            max_queued_requests: The most requests at a time beyond the engine's `max_num_seqs`.
            request_timeout_seconds: See `Driver`.
            stalled_after_seconds: See `Driver`.
        """
        self.num_places = built.engine.scheduler.max_num_seqs + max_queued_requests
        super().__init__(
            built.engine,
            num_places=self.num_places,
            request_timeout_seconds=request_timeout_seconds,
            stalled_after_seconds=stalled_after_seconds,
        )
        self.built = built

    async def snapshot(self, function: Callable[[Engine], _Result]) -> _Result:
        """Returns the result of a function that is called between two steps.

        It must be quick, because everybody waits for it.
        """
        return await asyncio.wrap_future(self.call(function))

    async def stats(self) -> dict[str, Any]:
        """Returns the values of all metrics."""
        return await self.snapshot(Engine.stats)

    async def memory_report(self, *, reset: bool = False) -> MemoryReport:
        """Returns the use of the KV pool over time; see `LLM.memory_report`."""
        return await self.snapshot(lambda engine: engine.memory_report(reset=reset))

    async def submit(
        self,
        requests: Sequence[PreparedRequest],
        *,
        stream: bool,
        name: str = "request",
        arrived: float | None = None,
    ) -> list[AwaitedHandle]:
        """Gives requests to the engine, all or none.

        Args:
            requests: The requests.
            stream: True if the reader asks for deltas; False if it asks for `whole`, once.
            name: The beginning of their ids, before a number of the driver's own.
            arrived: The time when they came in, by `time.monotonic`; None for now.

        Raises:
            QueueFull: There are too few free places now.
            CapacityError: There are too few places for so many requests at once, or one can never
                run.
            UnsupportedError: A beam search or `best_of` shows nothing before the end.
        """
        for request in requests if stream else ():
            check_streamable(request.params)
        deadline = (time.monotonic() if arrived is None else arrived) + self.timeout_seconds
        submitted = [
            AwaitedHandle(self, request, stream=stream, deadline=deadline) for request in requests
        ]
        added = self.add(submitted, name)
        try:
            await asyncio.wrap_future(added)
        except BaseException:  # even if cancelled: the engine may have the requests by now
            self.end(submitted)
            raise
        return submitted

    async def abort(self, submitted: AwaitedHandle) -> None:
        """Ends a request; its reader gets a last output."""
        turns = self.turns
        await self.snapshot(lambda engine: turns.abort(submitted))

    @contextlib.asynccontextmanager
    async def in_time(self, arrived: float) -> AsyncIterator[None]:
        """Cancels the work in its `async with` block when the time of a request is over.

        Args:
            arrived: The time when the request came in, by `time.monotonic`.

        Raises:
            DeadlineExceeded: The time was over.
        """
        left = arrived + self.timeout_seconds - time.monotonic()
        try:
            async with asyncio.timeout(None if math.isinf(left) else left) as clock:
                yield
        except TimeoutError:
            if not clock.expired():
                raise
            raise self.turns.too_late() from None

    async def vectors(
        self,
        requests: Sequence[PreparedRequest],
        embedder: Embedder,
        poolings: Sequence[TokenPooling],
    ) -> AsyncIterator[npt.NDArray[np.float32]]:
        """Yields the vectors of prompts, computed between steps, all with the same weights."""
        weights = await asyncio.wrap_future(self.weights())
        for request, pooling in zip(requests, poolings, strict=True):
            order = self.embed(embedder, weights["target"], request.token_ids, pooling)
            yield await asyncio.wrap_future(order)

    async def pinned(self, prefix: PreparedRequest) -> AsyncPinnedPrefix:
        """Computes a prefix and pins it; raises the same errors as `submit`."""
        with self.pinning(prefix) as answer:
            pin_id = await asyncio.wrap_future(answer)
        return AsyncPinnedPrefix(self, pin_id, len(prefix.token_ids))

    async def replaced_weights(self, weights: Any, *, abort: bool) -> int:
        """Takes other weights once nothing runs, and returns their version.

        If the caller stops waiting, the old weights stay.

        Args:
            weights: The weights as they are on the device.
            abort: True ends running and waiting requests with WeightsReplaced, and does not wait
                for them.

        Raises:
            RuntimeError: Another replacement is under way, or a prefix is pinned.
        """
        with self.replacing(weights, abort=abort, tells=True) as version:
            return await asyncio.wrap_future(version)

    async def drained(self, timeout: float | None, what: str = "The engine") -> bool:
        """Accepts no more requests, and waits until all have finished.

        Args:
            timeout: The seconds after which unfinished requests end with ShuttingDown.
            what: The thing that is shutting down, for the messages.

        Returns:
            True if all requests finished.
        """
        drained = self.drain(what)
        await self.snapshot(lambda engine: None)  # after this an idle engine has answered the drain
        if drained.done():
            return True
        try:
            await asyncio.wait_for(asyncio.wrap_future(drained), timeout)
        except TimeoutError:
            await asyncio.wrap_future(self.end_late(what))
            return False
        return True


def _fail(future: asyncio.Future[RequestOutput], error: JaxpageError) -> None:
    future.set_exception(error)
    future.exception()  # marks it as seen, so that asyncio does not complain if nobody waits


def _arrive(updates: list[Update]) -> None:
    for one, item in updates:
        assert isinstance(one, AwaitedHandle)
        one.arrived(item)
