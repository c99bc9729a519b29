"""A driver for event loops: `AsyncLLM` and the server await its answers and the outputs of requests."""

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
from jaxpage.device.embedder import Embedder, Pooling
from jaxpage.driver import Driver, Handle, Update, check_streamable, copy_error
from jaxpage.engine.admission import PreparedRequest
from jaxpage.engine.engine import Engine
from jaxpage.errors import JaxpageError, ShuttingDown
from jaxpage.memory import MemoryReport
from jaxpage.outputs import RequestOutput

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Home:
    """The event loop that reads requests. It is woken once for all that is new of them."""

    loop: asyncio.AbstractEventLoop

    def __call__(self, updates: list[Update]) -> None:
        # An event loop that is closed has nobody who waits.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(_arrive, updates)


class AwaitedHandle(Handle):
    """A request that is read on the event loop that submitted it; `cancel` may come from any thread.

    The next delta is made when the last one was taken, of everything since then.
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
        """Returns all of it, once it has finished. A reader that gives up has ended the request.

        Raises:
            DeadlineExceeded, EngineFailed, ShuttingDown, WeightsReplaced: It was ended.
        """
        try:
            return await self.next_delta()
        finally:
            self.cancel()

    def next_delta(self) -> asyncio.Future[RequestOutput]:
        """Returns what is new of a stream, or all of a request that is not streamed, at its end.

        The last delta has finish reasons. Raises what `whole` raises.
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
        """Ends the request before the engine's next step. A request that has ended stays as it is."""
        self._turns.end([self])

    def arrived(self, update: RequestOutput | JaxpageError) -> None:
        """Takes what the driver sent. An error comes without being asked for, and stays."""
        if isinstance(update, JaxpageError):
            self._error = update
        if self._waiting is None or self._waiting.done():
            return
        if isinstance(update, JaxpageError):
            _fail(self._waiting, update)
        else:
            self._waiting.set_result(update)


class AsyncPinnedPrefix:
    """A prefix whose keys and values stay in place until `release()` or the end of `async with`."""

    def __init__(self, driver: Driver, pin_id: int, num_tokens: int):
        self.num_tokens = num_tokens
        self._driver = driver
        self._pin_id = pin_id

    @property
    def released(self) -> bool:
        """Returns whether the blocks were given free, or lost in a failed step with the pages."""
        return not self._driver.is_pinned(self._pin_id)

    async def release(self) -> None:
        """Frees the blocks that no running request shares. A second call does nothing."""
        if not self.released:
            await asyncio.wrap_future(self._driver.unpin(self._pin_id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class AsyncDriver(Driver):
    """The driver of an engine, with methods that an event loop awaits.

    Each of them raises EngineFailed or ShuttingDown after the driver's end.
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
            max_queued_requests: How many requests may be there beyond the engine's `max_num_seqs`.
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
        """Returns what a function finds between two steps. It is quick, or everybody waits."""
        return await asyncio.wrap_future(self.call(function))

    async def stats(self) -> dict[str, Any]:
        """Returns the values of all metrics."""
        return await self.snapshot(Engine.stats)

    async def memory_report(self, *, reset: bool = False) -> MemoryReport:
        """Returns what the pool held; see `LLM.memory_report`."""
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
            stream: Deltas are asked of them again and again; otherwise `whole`, once.
            name: The beginning of their ids, before a number of the driver's own.
            arrived: When they came in, by `time.monotonic`; None: now.

        Raises:
            QueueFull: There are not so many places now.
            CapacityError: So many could never be there at once, or one could never run.
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
        except BaseException:  # cancelled as well, whether the engine has them by now or not
            self.end(submitted)
            raise
        return submitted

    async def abort(self, submitted: AwaitedHandle) -> None:
        """Ends a request whose reader gets a last output, whether a step has news of it or not."""
        turns = self.turns
        await self.snapshot(lambda engine: turns.abort(submitted))

    @contextlib.asynccontextmanager
    async def in_time(self, arrived: float) -> AsyncIterator[None]:
        """Breaks off what is done for a request when its time is over, with DeadlineExceeded.

        Args:
            arrived: When the request came in, by `time.monotonic`.
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
        self, requests: Sequence[PreparedRequest], embedder: Embedder, pooling: Pooling
    ) -> AsyncIterator[npt.NDArray[np.float32]]:
        """Computes vectors of prompts, each between two steps, with the weights of the first."""
        weights = await asyncio.wrap_future(self.weights())
        for request in requests:
            order = self.embed(embedder, weights, request.token_ids, pooling)
            yield await asyncio.wrap_future(order)

    async def pinned(self, prefix: PreparedRequest) -> AsyncPinnedPrefix:
        """Computes a prefix and pins it. Raises what `submit` raises."""
        pinning = self.pin(prefix)
        try:
            pin_id = await asyncio.wrap_future(pinning.pin_id)
        except BaseException:
            self.call(pinning.withdraw)
            raise
        return AsyncPinnedPrefix(self, pin_id, len(prefix.token_ids))

    async def replaced_weights(self, weights: Any, *, abort: bool) -> int:
        """Takes other weights once nothing runs, and returns their version.

        A caller that stops waiting takes them back.

        Args:
            weights: The weights as they are on the device.
            abort: End what runs or waits with WeightsReplaced, instead of waiting for it.

        Raises:
            RuntimeError: Others are on their way already, or a prefix is pinned.
        """
        replacement = self.replace_weights(weights, abort=abort, tells=True)
        try:
            return await asyncio.wrap_future(replacement.version)
        finally:
            replacement.withdraw()

    async def drained(self, timeout: float | None, what: str = "The engine") -> bool:
        """Takes nothing in any more, and waits for what is there.

        Args:
            timeout: The seconds after which what has not finished ends with ShuttingDown.
            what: What is shutting down, for the errors.

        Returns whether everything finished.
        """
        drained = self.drain(what)
        await self.snapshot(lambda engine: None)  # after it an empty engine has been drained
        if drained.done():
            return True
        try:
            await asyncio.wait_for(asyncio.wrap_future(drained), timeout)
        except TimeoutError:
            why = ShuttingDown(f"{what} is shutting down; the time to finish was over")
            await asyncio.wrap_future(self.end_all(why))
            return False
        return True


def _fail(future: asyncio.Future[RequestOutput], error: JaxpageError) -> None:
    future.set_exception(error)
    future.exception()  # seen: asyncio logs no complaint if nobody waits for it any more


def _arrive(updates: list[Update]) -> None:
    for one, item in updates:
        assert isinstance(one, AwaitedHandle)
        one.arrived(item)
