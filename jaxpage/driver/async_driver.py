"""Defines the driver for event loops, for `AsyncLLM` and the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Hashable,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from jaxpage.assembly import Built
from jaxpage.device import AnyEmbedder
from jaxpage.driver.driver import COMMAND_SECONDS, Driver
from jaxpage.driver.facade import HeldPrefix, check_streamable
from jaxpage.driver.handle import Handle, Update, copy_error
from jaxpage.engine import Engine, PreparedRequest
from jaxpage.errors import EngineFailed, JaxpageError
from jaxpage.memory import MemoryReport
from jaxpage.outputs import RequestOutput, TokenPooling
from jaxpage.step.update import Mode

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
# The most tokens and log probabilities of one output that the driver's thread makes while all other
# requests wait: some milliseconds.
MAX_ENTRIES = 2048
_MIN_ENTRIES = 256  # for each of many requests that are submitted together


# Equal for one loop, so that `send` makes one list of all its updates.
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

    The next delta is made when the reader asks for it, and has what is new since the last one, as
    far as its bound allows. The log probabilities of a large output are made on another thread.
    Any thread may call `cancel`.
    """

    def __init__(
        self,
        driver: AsyncDriver,
        request: PreparedRequest,
        *,
        stream: bool,
        deadline: float,
        max_entries: int = MAX_ENTRIES,
        name: Hashable | None = None,
    ) -> None:
        self._home = asyncio.get_running_loop()
        super().__init__(
            request,
            _Home(self._home),
            is_stream=stream,
            is_pushed=False,
            deadline=deadline,
            max_entries=max_entries,
            is_kept=name is not None,
            name=name,
        )
        self._turns = driver.turns
        self._completing = driver.completing
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
        elif self.reporter is not None and self.reporter.is_brief:
            self._complete(self._waiting, update)
        else:
            self._waiting.set_result(update)

    def _complete(self, waiting: asyncio.Future[RequestOutput], output: RequestOutput) -> None:
        """Adds log probabilities to an output on another thread, and gives it to the reader."""
        assert self.reporter is not None
        # The reporter makes no other output until the reader has this one.
        complete = partial(self.reporter.add_logprobs, output, is_delta=self.is_stream)

        def finish(made: asyncio.Future[RequestOutput]) -> None:
            if waiting.done():
                return
            if made.cancelled() or made.exception() is not None:
                logger.error(
                    "the output of request %s cannot be reported",
                    self.request_id,
                    exc_info=None if made.cancelled() else made.exception(),
                )
                _fail(waiting, EngineFailed("The engine failed to report the output"))
            else:
                waiting.set_result(made.result())

        self._home.run_in_executor(self._completing, complete).add_done_callback(finish)


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
        max_num_seqs: The most sequences that run at a time.
        num_places: The most requests at a time.
        completing: The thread that makes the log probabilities of large outputs, one at a time.
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
        self.max_num_seqs = built.engine.max_num_seqs
        self.num_places = self.max_num_seqs + max_queued_requests
        super().__init__(
            built.engine,
            num_places=self.num_places,
            request_timeout_seconds=request_timeout_seconds,
            stalled_after_seconds=stalled_after_seconds,
            max_aborted_requests=built.spec.config.max_aborted_requests,
        )
        self.built = built
        self.completing = ThreadPoolExecutor(1, thread_name_prefix="jaxpage-outputs")

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
        kept_as: Hashable | None = None,
    ) -> list[AwaitedHandle]:
        """Gives requests to the engine, all or none.

        Args:
            requests: The requests.
            stream: True if the reader asks for deltas; False if it asks for `whole`, once.
            name: The beginning of their ids, before a number of the driver's own.
            arrived: The time when they came in, by `time.monotonic`; None for now.
            kept_as: The id by which one request can be continued after it was aborted, or goes on;
                None if it cannot.

        Raises:
            QueueFull: There are too few free places now.
            CapacityError: There are too few places for so many requests at once, or one can never
                run.
            UnsupportedError: A beam search or `best_of` shows nothing before the end.
        """
        # They finish in one step at best, and their outputs are then made in one turn.
        max_entries = max(_MIN_ENTRIES, MAX_ENTRIES // max(1, len(requests)))
        handles = [
            self.handle(
                request, stream=stream, arrived=arrived, max_entries=max_entries, name=kept_as
            )
            for request in requests
        ]
        await self.add_all(handles, name)
        return handles

    def handle(
        self,
        request: PreparedRequest,
        *,
        stream: bool,
        arrived: float | None = None,
        max_entries: int = MAX_ENTRIES,
        name: Hashable | None = None,
    ) -> AwaitedHandle:
        """Returns a handle for `add_all`; it may be aborted before. For the rest see `submit`.

        Args:
            request: The request.
            stream: See `submit`.
            arrived: See `submit`.
            max_entries: See `Handle`.
            name: The id by which it can be continued after it was aborted; None if it cannot.
        """
        if stream:
            check_streamable(request.params)
        deadline = (time.monotonic() if arrived is None else arrived) + self.timeout_seconds
        return AwaitedHandle(
            self,
            request,
            stream=stream,
            deadline=deadline,
            max_entries=max_entries,
            name=name,
        )

    async def add_all(self, handles: Sequence[AwaitedHandle], name: str = "request") -> None:
        """Gives requests to the engine, all or none; see `submit`."""
        added = self.add(handles, name)
        try:
            await asyncio.wrap_future(added)
        except BaseException:  # even if cancelled: the engine may have the requests by now
            self.end(handles)
            raise

    async def abort_named(self, names: Collection[Hashable]) -> int:
        """Ends the requests with these names, with a last output; returns how many there were."""
        turns = self.turns

        def abort(engine: Engine) -> int:
            handles = [
                handle
                for handle in turns.live.values()
                if handle.name in names and handle.is_unfinished
            ]
            for handle in handles:
                turns.abort(handle)
            return len(handles)

        return await self.snapshot(abort)

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
            # The work itself may raise a TimeoutError.
            if not clock.expired():
                raise
            raise self.turns.too_late() from None

    async def vectors(
        self,
        requests: Sequence[PreparedRequest],
        embedder: AnyEmbedder,
        poolings: Sequence[TokenPooling],
    ) -> AsyncGenerator[npt.NDArray[np.float32], None]:
        """Yields the pooled vectors of prompts; see `Driver.embedding`.

        A reader that stops early closes the generator (`contextlib.aclosing`).
        """
        with self.embedding(embedder, requests, poolings) as answers:
            for answer in answers:
                yield await asyncio.wrap_future(answer)

    async def pin(self, prefix: PreparedRequest) -> AsyncPinnedPrefix:
        """Computes a prefix and pins it; raises the same errors as `submit`."""
        with self.pinning(prefix) as answer:
            pin_id = await asyncio.wrap_future(answer)
        return AsyncPinnedPrefix(self, pin_id, len(prefix.token_ids))

    async def replace_weights(
        self, weights: Any, mode: Mode = "wait", checksum: str | None = None
    ) -> int:
        """Takes other weights, and returns their version.

        If the caller stops waiting, the old weights stay.

        Args:
            weights: The weights as they are on the device.
            mode: See `Driver.replacing`. With "abort", requests end with WeightsReplaced.
            checksum: See `Driver.replacing`.

        Raises:
            RuntimeError: Another replacement is under way, a prefix is pinned, or the engine is
                paused and requests would have to finish first.
        """
        with self.replacing(weights, mode, checksum, tells=True) as version:
            return await asyncio.wrap_future(version)

    async def wait_until_drained(self, timeout: float | None, subject: str = "The engine") -> bool:
        """Accepts no more requests, and waits until all have finished.

        Args:
            timeout: The seconds after which unfinished requests end with ShuttingDown. If a step
                takes long, they end before the next one.
            subject: The thing that is shutting down, for the messages.

        Returns:
            True if all requests finished.
        """
        drained = self.drain(subject)
        try:
            await _within(timeout, drained)
        except TimeoutError:
            try:
                return await _within(COMMAND_SECONDS, self.end_late(subject)) == 0
            except TimeoutError:
                return False
        return True


async def _within(timeout: float | None, answer: Future[_Result]) -> _Result:
    """Returns an answer, or raises TimeoutError; the command is run nevertheless."""
    return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(answer)), timeout)


def _fail(future: asyncio.Future[RequestOutput], error: JaxpageError) -> None:
    future.set_exception(error)
    future.exception()  # marks it as seen, so that asyncio does not complain if nobody waits


def _arrive(updates: list[Update]) -> None:
    for handle, item in updates:
        assert isinstance(handle, AwaitedHandle)
        handle.arrived(item)
