"""The engine on a thread of its own. Requests come from event loops, and what is new of them goes back to the loop that waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from jaxpage.assembly import Built
from jaxpage.engine.admission import PreparedRequest
from jaxpage.engine.calls import Calls, check_streamable
from jaxpage.engine.engine import Engine
from jaxpage.engine.reporting import Reporter
from jaxpage.errors import (
    CapacityError,
    DeadlineExceeded,
    EngineFailed,
    JaxpageError,
    QueueFull,
    ShuttingDown,
    WeightsReplaced,
)
from jaxpage.serving.orders import Order, Replacement
from jaxpage.serving.pacing import Pace
from jaxpage.serving.request_handle import RequestHandle, Update, copy_error, send

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class EngineLoop:
    """Steps the engine while there is work, and between two steps does what others ask of it, in order."""

    def __init__(
        self,
        built: Built,
        *,
        max_queued_requests: int = 256,
        request_timeout_seconds: float | None = None,
        stalled_after_seconds: float = 60.0,
    ) -> None:
        """
        Args:
            max_queued_requests: how many may be there beyond the engine's `max_num_seqs`. More are refused.
            request_timeout_seconds: from its arrival to the end of a request.
            stalled_after_seconds: a step that takes longer makes `healthy` false.
        """
        self.num_places = built.engine.scheduler.max_num_seqs + max_queued_requests
        self.ended: Future[None] = Future()  # of the thread; with EngineFailed and its cause, if it died
        self.built = built
        self.pace = Pace()
        self.engine = built.engine  # after `start` only for `check` and `compiled`, which change nothing
        self._calls = Calls(built.engine)
        self._timeout = math.inf if request_timeout_seconds is None else request_timeout_seconds
        self._stalled_after = stalled_after_seconds
        self._thread = threading.Thread(target=self._run, name="jaxpage-engine", daemon=True)
        self._inbox: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the next three
        self._refusal: JaxpageError | None = None  # why nothing is taken in any more
        self._is_over = False  # the inbox is not read any more
        self._num_open = 0  # requests that have a place
        self._turn_began: float | None = None  # None while there is nothing to do
        self._live: dict[str, RequestHandle] = {}  # from here on: of the thread
        self._updates: list[Update] = []
        self._drained: list[Future[None]] = []
        self._is_stopping = False
        self._replacement: Replacement | None = None
        self._held: list[Order] = []  # requests that come in behind it

    # Asked by anybody

    def start(self) -> None:
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the engine's thread lives and goes round: it waits for work, or its turn began not long ago."""
        return self._thread.is_alive() and not self._is_over and (self.step_age or 0.0) < self._stalled_after

    @property
    def step_age(self) -> float | None:
        """Seconds since the step that is being taken began; None while nothing is to be done."""
        began = self._turn_began
        return None if began is None else time.monotonic() - began

    @property
    def ready(self) -> bool:
        """Whether requests are taken in."""
        return self.healthy and self._refusal is None

    def call(self, function: Callable[[Engine], _Result], *, adds_requests: bool = False) -> Future[_Result]:
        """Runs a function of the engine between two steps. Raises EngineFailed or ShuttingDown when there is no thread to do it."""
        future: Future[_Result] = Future()
        self._post(Order(function, future, adds_requests))
        return future

    async def snapshot(self, function: Callable[[Engine], _Result]) -> _Result:
        """What a function finds between two steps. It is quick, or everybody waits. Raises what `call` raises, and what it raises."""
        return await asyncio.wrap_future(self.call(function))

    async def abort(self, submitted: RequestHandle) -> None:
        """Ends a request whose reader gets a last output, whether a step has news of it or not."""
        await self.snapshot(lambda engine: self._updated(submitted, aborted=True))

    async def stats(self) -> dict[str, Any]:
        return await self.snapshot(Engine.stats)

    async def submit(
        self, requests: Sequence[PreparedRequest], *, stream: bool, name: str = "request", arrived: float | None = None
    ) -> list[RequestHandle]:
        """Gives requests to the engine, all or none.

        stream: whether what is new will be asked of them, again and again, or `whole`. name: what their ids begin with, before a
        number of the engine's own. arrived: when, by `time.monotonic`; None: now.

        Raises QueueFull, ShuttingDown, EngineFailed; CapacityError if so many could never be there at once, or one could never run;
        UnsupportedError: of a beam search or of `best_of` nothing can be shown before the end.
        """
        for request in requests if stream else ():
            check_streamable(request.params)
        deadline = (time.monotonic() if arrived is None else arrived) + self._timeout
        submitted = [RequestHandle(self, request, stream=stream, deadline=deadline) for request in requests]
        self._take_places(len(submitted))
        try:
            await asyncio.wrap_future(self.call(lambda engine: self._add(submitted, name), adds_requests=True))
        except BaseException:  # cancelled as well, whether the engine has them by now or not
            for one in submitted:
                one.cancel()
            raise
        return submitted

    @contextlib.asynccontextmanager
    async def in_time(self, arrived: float) -> AsyncIterator[None]:
        """Breaks off what is done for a request that arrived then, by `time.monotonic`, when its time is over: DeadlineExceeded."""
        left = arrived + self._timeout - time.monotonic()
        try:
            async with asyncio.timeout(None if math.isinf(left) else left) as clock:
                yield
        except TimeoutError:
            if not clock.expired():
                raise
            raise self._too_late() from None

    def want(self, submitted: RequestHandle) -> None:
        """The last delta was taken."""
        self._post(Order(lambda engine: self._wanted(submitted)))

    def end(self, submitted: RequestHandle) -> None:
        """Its blocks are free before the next step."""
        with contextlib.suppress(JaxpageError):  # everything has ended
            self._post(Order(lambda engine: self._end(submitted)))

    async def replace_weights(self, weights: Any, *, abort: bool) -> int:
        """Takes other weights once nothing runs, and returns their version. Requests that come in meanwhile wait, and get the new ones.
        Who stops waiting takes it back.

        weights: as on the device. abort: end what runs or waits with WeightsReplaced, instead of waiting for it.

        Raises RuntimeError if others are on their way already, or a prefix is pinned, and what `call` raises.
        """
        replacement = Replacement(weights, Future())
        try:
            await self.snapshot(lambda engine: self._begin_replacing(replacement, abort=abort))
            return await asyncio.wrap_future(replacement.version)
        finally:
            replacement.version.cancel()

    async def drain(self, timeout: float | None) -> bool:
        """Takes nothing in any more, and waits for what is there. What has not finished in time ends with ShuttingDown.

        Returns whether everything finished.
        """
        with self._lock:
            self._refusal = self._refusal or ShuttingDown("The server is shutting down")
        drained: Future[None] = Future()
        await self.snapshot(lambda engine: self._drain(drained))
        if drained.done():
            return True
        try:
            await asyncio.wait_for(asyncio.wrap_future(drained), timeout)
        except TimeoutError:
            message = "The server is shutting down; the time to finish was over"
            await self.snapshot(lambda engine: self._end_all(ShuttingDown(message)))
            return False
        return True

    def stop(self, timeout: float | None = None) -> bool:
        """Ends everything and frees the device. False if a step took longer than `timeout` seconds: it is still being taken."""
        with contextlib.suppress(JaxpageError):  # it has stopped
            self._post(Order(self._stop))
        if self._thread.ident is not None:  # it has been started
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _post(self, order: Order) -> None:
        with self._lock:
            if self._is_over and self._refusal is not None:
                raise copy_error(self._refusal)
            self._inbox.put(order)

    def _take_places(self, number: int) -> None:
        with self._lock:
            if self._refusal is not None:
                raise copy_error(self._refusal)
            if number > self.num_places:
                raise CapacityError(
                    f"{number} requests at once; max_num_seqs + max_queued_requests is {self.num_places}"
                )
            if self._num_open + number > self.num_places:
                raise QueueFull(
                    f"{self._num_open} requests run or wait, and there are {self.num_places} places; try again later"
                )
            self._num_open += number

    # On the engine's thread

    def _run(self) -> None:
        error: JaxpageError = ShuttingDown("The engine was shut down")
        try:
            while not self._is_stopping:
                self._turn()
            self._end_all(error)
            self._calls.shutdown()
            self._close(error)
        except BaseException as death:
            logger.critical("the engine's thread has died", exc_info=death)
            self.fail(death)

    def fail(self, death: BaseException) -> None:
        """Ends everything with EngineFailed: on any thread, also while a step is taken that may never end."""
        error = EngineFailed("The engine has failed")
        error.__cause__ = death  # not itself: event loops end when a SystemExit comes by
        self._close(error)

    def _close(self, error: JaxpageError) -> None:
        """Only the first call does anything."""
        with self._lock:
            if self._is_over:
                return
            self._refusal, self._is_over = error, True
            self.ended.set_exception(error if isinstance(error, EngineFailed) else None)  # before anybody hears of it
        self._updates += [(one, copy_error(error)) for one in list(self._live.values())]
        self._send_updates()
        orders = self._held + ([self._replacement.order()] if self._replacement else [])
        with contextlib.suppress(queue.Empty):
            while True:
                orders.append(self._inbox.get_nowait())
        for order in orders:
            order.refuse(copy_error(error))
        self._inbox.put(Order(self._stop))  # for a thread that waits

    def _turn(self) -> None:
        """What others ask, a step, and what came of it."""
        self._replace_weights()
        if not self.engine.has_unfinished:
            self._turn_began = None
            self._obey(self._inbox.get())
        self._turn_began = time.monotonic()
        for _ in range(self._inbox.qsize()):
            self._obey(self._inbox.get())
        self._end_what_is_late()
        if self.engine.has_unfinished and not self._is_stopping and self.pace.lets_step(self._inbox):
            self._step()
        self._send_updates()

    def _obey(self, order: Order) -> None:
        if order.adds_requests and self._replacement is not None:
            self._held.append(order)
        else:
            order.obey(self.engine)

    def _begin_replacing(self, replacement: Replacement, *, abort: bool) -> None:
        if self._replacement is not None:
            raise RuntimeError("Other weights are on their way already")
        self._replacement = replacement
        if abort:
            self._end_all(WeightsReplaced("The request was ended: the model gets other weights"))

    def _replace_weights(self) -> None:
        """If others wait, and nothing runs. What was held comes in."""
        if self._replacement is None or (self.engine.has_unfinished and not self._replacement.version.cancelled()):
            return
        self._replacement.order().obey(self.engine)
        self._replacement = None
        held, self._held = self._held, []
        for order in held:
            order.obey(self.engine)

    def _step(self) -> None:
        try:
            groups = self.engine.step()
        except Exception as error:
            self._recover(error)
            return
        for group in groups:
            if (one := self._live.get(group.request.request_id)) is not None:
                self._updated(one)

    def _recover(self, error: Exception) -> None:
        """After a step that could neither be taken nor be failed: all requests end, and the engine is empty and whole, or dies."""
        logger.error("a step failed; all requests end with an error", exc_info=error)
        self._end_all(EngineFailed("The engine failed during generation"))
        self.engine.abort_all()
        self.engine.recover()
        stats = self.engine.stats()
        num_left = stats["num_blocks_free"] + stats["num_blocks_pinned"]
        if self.engine.has_unfinished or num_left != stats["num_blocks_total"]:
            raise RuntimeError("KV blocks were not freed after a failed step") from error

    def _add(self, submitted: list[RequestHandle], name: str) -> None:
        reporters: dict[str, Reporter] = {}
        try:
            self._calls.add([one.request for one in submitted], reporters, kind=name)
        except BaseException:
            self._calls.end(reporters)
            raise
        for one, (request_id, reporter) in zip(submitted, reporters.items(), strict=True):
            one.request_id, one.reporter = request_id, reporter
            self._live[request_id] = one

    def _wanted(self, one: RequestHandle) -> None:
        one.is_wanted = True
        self._offer(one)

    def _updated(self, one: RequestHandle, *, aborted: bool = False) -> None:
        if aborted:
            self.engine.abort(one.request_id)
        one.is_updated = True
        self._offer(one)

    def _offer(self, one: RequestHandle) -> None:
        """Makes the next delta of what was updated, or the whole of what has finished, if a handler waits for it."""
        reporter = one.reporter
        if reporter is None or not one.is_wanted or not (one.is_updated if one.stream else reporter.finished):
            return
        one.is_wanted = one.is_updated = False
        try:
            output = reporter.delta() if one.stream else reporter.whole()
        except Exception as error:
            logger.error("the output of request %s cannot be reported", one.request_id, exc_info=error)
            self._end(one, EngineFailed("The engine failed to report the output"))
            return
        self._updates.append((one, output))
        if output.finished:
            self._end(one)

    def _end_what_is_late(self) -> None:
        now = time.monotonic()
        for one in [one for one in self._live.values() if one.deadline < now]:
            if one.reporter is not None and not one.reporter.finished:
                self._end(one, self._too_late())

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"The request did not finish within {self._timeout:g} s")

    def _end(self, one: RequestHandle, why: JaxpageError | None = None) -> None:
        """Its place and its blocks are free. What has ended before, or was never added, has none."""
        if one.is_over:
            return
        one.is_over = True
        with self._lock:
            self._num_open -= 1
        if self._live.pop(one.request_id, None) is not None:
            self._calls.end([one.request_id])
        if why is not None:
            self._updates.append((one, why))
        else:
            one.is_updated = True  # for who still waits: that it was aborted
            self._offer(one)
        self._tell_if_drained()

    def _drain(self, drained: Future[None]) -> None:
        self._drained.append(drained)
        self._tell_if_drained()

    def _tell_if_drained(self) -> None:
        while self._drained and not self._live:
            drained = self._drained.pop()
            if drained.set_running_or_notify_cancel():
                drained.set_result(None)

    def _end_all(self, why: JaxpageError) -> None:
        for one in list(self._live.values()):
            self._end(one, copy_error(why))

    def _send_updates(self) -> None:
        updates, self._updates = self._updates, []
        send(updates)

    def _stop(self, engine: Engine) -> None:
        self._is_stopping = True
