"""Takes the turns of a driver: obeys orders, runs a step, and sends the outputs.

All methods but `num_open`, `post`, `want`, `end`, `leave`, `take_places` and `fail` run on the
thread that takes the turns. Nothing else changes the engine.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from jaxpage.driver.handle import Handle, Update, copy_error, send
from jaxpage.driver.orders import LATER, Answer, Change, Order
from jaxpage.engine import Engine
from jaxpage.errors import (
    CapacityError,
    DeadlineExceeded,
    EngineFailed,
    JaxpageError,
    QueueFull,
    ShuttingDown,
    WeightsReplaced,
)

logger = logging.getLogger(__name__)


class Turns:
    """Does everything that a driver's thread does.

    The methods for other threads take no lock: a finaliser or a signal handler may call them in the
    middle of another of them, on the same thread.
    """

    def __init__(self, engine: Engine, *, num_places: int | None, timeout_seconds: float) -> None:
        """Makes the turns of an engine.

        Args:
            engine: The engine, which belongs to the turns from now on.
            num_places: The most requests at a time; None means any number.
            timeout_seconds: The time of a request that has a deadline, for the message.
        """
        self.engine = engine
        self.inbox: queue.SimpleQueue[Order] = queue.SimpleQueue()
        # This future ends with the turns. If an exception ended them, it has EngineFailed with that
        # cause.
        self.ended: Future[None] = Future()
        # The future counts as running, so that a waiter that is cancelled does not cancel it for
        # others.
        self.ended.set_running_or_notify_cancel()
        self.began: float | None = None  # the start of this turn; None if there is nothing to do
        self.before_step: Callable[[Callable[[], bool]], bool] | None = None
        self.live: dict[str, Handle] = {}
        self.change: Change[Any] | None = None
        self.draining: ShuttingDown | None = None  # why new requests are refused
        self.refusal: JaxpageError | None = None  # why everything is refused
        self.is_over = False  # nobody reads the inbox any more
        self.taker: int | None = None  # the thread that takes a turn now
        self._num_places = num_places
        self._places = deque([None] * (num_places or 0))  # each request takes one out
        self._timeout_seconds = timeout_seconds
        self._numbers = itertools.count()
        self._updates: list[Update] = []
        self._drained: list[Answer[None]] = []
        self._later: list[Answer[Any]] = []  # the answers that will come later
        self._held: list[Order] = []  # orders that wait for other weights
        self._is_stopping = False
        self._keeps_engine = False
        self._is_closing = threading.Lock()  # is acquired once and never released

    # Methods for any thread.

    @property
    def num_open(self) -> int:
        """Returns how many requests have a place; 0 if the number of places has no limit."""
        return (self._num_places or 0) - len(self._places)

    def post(self, order: Order) -> None:
        """Puts an order into the inbox. It is refused if nobody reads the inbox any more."""
        self.inbox.put(order)
        # Check after the put: the thread that closes the inbox sets `is_over` first and then
        # empties it.
        if self.is_over:
            self._refuse_orders()

    def want(self, one: Handle) -> None:
        """Asks for the next output of a request; raises the error that ended the driver, if any."""
        self.post(Order(lambda engine: self._wanted(one)))
        if self.is_over and self.refusal is not None:
            raise copy_error(self.refusal)

    def end(self, handles: Iterable[Handle]) -> None:
        """Notes requests that end before the next step. Requests that have ended are no error."""
        unfinished = [one for one in handles if not one.is_over]
        if unfinished:
            self.inbox.put(Order(lambda engine: self._end_each(unfinished)))

    def leave(self) -> None:
        """Ends the turns, and leaves the engine as it is. Later orders are refused."""
        self.inbox.put(Order(self._leave))

    def take_places(self, number: int) -> None:
        """Takes places for some requests, all or none. Ending a request gives its place back.

        Raises:
            JaxpageError: New requests are refused.
            CapacityError: There are too few places for so many requests at once.
            QueueFull: There are too few free places now.
        """
        if (refusal := self.refusal or self.draining) is not None:
            raise copy_error(refusal)
        if self._num_places is None:
            return
        if number > self._num_places:
            raise CapacityError(
                f"{number} requests at once; max_num_seqs + max_queued_requests is {self._num_places}"
            )
        num_taken = 0
        try:
            while num_taken < number:
                self._places.pop()
                num_taken += 1
        except IndexError:
            self._places.extend([None] * num_taken)
            raise QueueFull(
                f"{self.num_open} requests run or wait, and there are {self._num_places} places; try again later"
            ) from None

    def fail(self, death: BaseException) -> None:
        """Ends everything with EngineFailed, even while a step runs that may never end."""
        error = EngineFailed("The engine has failed")
        error.__cause__ = death  # as a cause only, because a SystemExit would end an event loop
        self._close(error)

    # Methods for the thread that takes the turns.

    def run(self) -> None:
        """Takes turns until an order ends them."""
        error = ShuttingDown("The engine was shut down")
        try:
            while not self._is_stopping:
                self.turn()
            if self._keeps_engine:
                self._leave_off(error)
                return
            self.end_all(error)
            self.close_engine()
            self._close(error)
        except BaseException as death:
            logger.critical("the engine's thread has died", exc_info=death)
            self.fail(death)

    def turn(self, *, waits: bool = True) -> bool:
        """Obeys the orders in the inbox, runs a step, and sends the outputs.

        Args:
            waits: True waits for an order if there is nothing to do.

        Returns:
            True if there was anything to do.
        """
        self.taker = threading.get_ident()
        try:
            return self._turn(waits)
        finally:
            self.taker = None

    def _turn(self, waits: bool) -> bool:
        has_changed = self._change_weights()
        if not self._has_work:
            self.began = None
            if not waits and self.inbox.empty():
                return has_changed
            self._obey(self.inbox.get())
        self.began = time.monotonic()
        for _ in range(self.inbox.qsize()):
            self._obey(self.inbox.get())
        self._end_what_is_late()
        if self._has_work and not self._is_stopping and self._may_step():
            self._step()
        self._send_updates()
        return True

    def obey_orders(self) -> bool:
        """Obeys the orders in the inbox without a step, and returns whether there were any."""
        number = self.inbox.qsize()
        for _ in range(number):
            self._obey(self.inbox.get())
        self._send_updates()
        return number > 0

    @property
    def _has_work(self) -> bool:
        """Returns whether a request of this driver is unfinished."""
        return bool(self.live) and self.engine.has_unfinished

    def _may_step(self) -> bool:
        return self.before_step is None or self.before_step(lambda: not self.inbox.empty())

    def _obey(self, order: Order) -> None:
        waits = self.change is not None or self.engine.is_asleep
        if order.waits_for_weights and waits:
            self._held.append(order)
        else:
            order.obey(self.engine)

    def _step(self) -> None:
        try:
            groups = self.engine.step()
        except Exception as error:
            self._recover(error)
            return
        for group in groups:
            one = self.live.get(group.request.request_id)
            if one is not None:
                one.is_updated = True
                self._offer(one)

    def _recover(self, error: Exception) -> None:
        """Ends all requests after a step that raised an error outside the engine's own handling.

        The block tables may have what the step moved while the pages lack it, so the pages are made
        anew. If a request or a block is left over afterwards, the driver ends.
        """
        logger.error("a step failed; all requests end with an error", exc_info=error)
        failure = EngineFailed("The engine failed during generation")
        failure.__cause__ = error
        self.end_all(failure)
        self.engine.abort_all()
        self.engine.rebuild_pages()
        stats = self.engine.stats()
        num_left = stats["num_blocks_free"] + stats["num_blocks_pinned"]
        if self.engine.has_unfinished or num_left != stats["num_blocks_total"]:
            raise RuntimeError("KV blocks were not freed after a failed step") from error

    def add(self, handles: Sequence[Handle], name: str) -> None:
        """Gives requests to the engine, all or none.

        Args:
            handles: The requests.
            name: The beginning of their ids, before a number.
        """
        added: list[Handle] = []
        try:
            for one in handles:
                one.request_id = f"{name}-{next(self._numbers)}"
                one.reporter = self.engine.add(one.request_id, one.request)
                added.append(one)
        except BaseException:
            for one in added:
                self.engine.abort(one.request_id)
                one.reporter = None
            raise
        self.live.update((one.request_id, one) for one in handles)

    def abort(self, one: Handle) -> None:
        """Aborts a request whose reader gets a last output."""
        self.engine.abort(one.request_id)
        one.is_updated = True
        self._offer(one)

    def _wanted(self, one: Handle) -> None:
        one.is_wanted = True
        self._offer(one)

    def _offer(self, one: Handle) -> None:
        """Makes the next output of a request, if its reader wants one now (see `Handle`)."""
        try:
            output = one.news()
        except Exception as error:
            logger.error(
                "the output of request %s cannot be reported", one.request_id, exc_info=error
            )
            failure = EngineFailed("The engine failed to report the output")
            failure.__cause__ = error
            self.end_one(one, failure)
            return
        if output is None:
            return
        self._updates.append((one, output))
        if output.finished:
            self.end_one(one)

    def _end_what_is_late(self) -> None:
        if math.isinf(self._timeout_seconds):
            return
        now = time.monotonic()
        for one in [one for one in self.live.values() if one.deadline < now]:
            if one.reporter is not None and not one.reporter.finished:
                self.end_one(one, self.too_late())

    def too_late(self) -> DeadlineExceeded:
        """Returns the error of a request whose time is over."""
        return DeadlineExceeded(f"The request did not finish within {self._timeout_seconds:g} s")

    def _end_each(self, handles: Sequence[Handle]) -> None:
        for one in handles:
            self.end_one(one)

    def end_one(self, one: Handle, why: JaxpageError | None = None) -> None:
        """Ends a request; its place and blocks are free from now on.

        Args:
            one: The request. One that has ended or was never added has nothing to give back.
            why: The error for its reader. If it is None, a reader that waits gets a last output.
        """
        if one.is_over:
            return
        one.is_over = True
        if self._num_places is not None:
            self._places.append(None)
        if self.live.pop(one.request_id, None) is not None:
            self.engine.abort(one.request_id)
        if why is not None:
            self._updates.append((one, why))
        else:
            one.is_updated = True
            self._offer(one)
        self._answer_drains()

    def end_all(self, why: JaxpageError | None) -> None:
        """Ends every request, with a copy of an error or with a last output."""
        for one in list(self.live.values()):
            self.end_one(one, why and copy_error(why))

    def begin_drain(self, answer: Answer[None]) -> object:
        """Gives the answer when no request is left."""
        self._drained.append(answer)
        self._later.append(answer)
        self._answer_drains()
        return LATER

    def _answer_drains(self) -> None:
        while self._drained and not self.live:
            self.answer(self._drained.pop(), None)

    def begin_later(self, answer: Answer[Any]) -> object:
        """Notes an answer that is given later; it becomes an error if the turns end before."""
        self._later.append(answer)
        return LATER

    def answer(self, answer: Answer[Any], result: Any) -> None:
        """Gives an answer that came later."""
        self._later.remove(answer)
        answer.set_result(result)

    def fail_later(self, answer: Answer[Any], error: Exception) -> None:
        """Gives an error as an answer that came later, unless the answer was given already."""
        if answer in self._later:
            self._later.remove(answer)
            answer.set_exception(error)

    def begin_change(self, change: Change[Any], *, abort: bool, tells: bool) -> object:
        """Holds a change until nothing runs, and makes later requests wait for it.

        Args:
            change: The change.
            abort: True ends the running and waiting requests, and does not wait for them.
            tells: True ends them with WeightsReplaced, False with a last output.
        """
        if self.change is not None:
            raise RuntimeError("Other weights, or sleep, are on their way already")
        self.change = change
        self._later.append(change.answer)
        if abort:
            why = WeightsReplaced("The request was ended: the model gets other weights")
            self.end_all(why if tells else None)
        return LATER

    def _change_weights(self) -> bool:
        """Makes the change if nothing runs, and then obeys the orders that waited for it.

        Returns:
            True if a change waited and does not wait any more: it was made, refused or withdrawn.
        """
        change = self.change
        if change is None or (self._has_work and not change.is_withdrawn):
            return False
        self.change = None
        self._later.remove(change.answer)
        try:
            if change.is_withdrawn:
                raise RuntimeError("The weights were taken back")
            result = change.function(self.engine)
        except Exception as error:
            change.answer.set_exception(error)
        else:
            change.answer.set_result(result)
        self._obey_held()
        return True

    def wake(self, parameters: Any) -> None:
        """Wakes the engine with its weights, and then obeys the orders that waited for it."""
        self.engine.wake(parameters)
        self._obey_held()

    def _obey_held(self) -> None:
        held = self._held
        self._held = []
        for order in held:
            self._obey(order)

    def close_engine(self) -> None:
        """Frees the device."""
        self.engine.abort_all()
        self.engine.events.closed()
        self.engine.runner.close()
        self.engine.grammars.close()

    def stop(self, engine: Engine) -> None:
        """Ends the turns after this one; this is the function of an order."""
        self._is_stopping = True

    def _leave(self, engine: Engine) -> None:
        self._is_stopping = self._keeps_engine = True

    def _leave_off(self, error: JaxpageError) -> None:
        """Refuses later orders, and leaves earlier ones unanswered.

        After the last reference is gone, nobody waits. At the interpreter's exit only threads wait
        that end anyway, and an error would make them print a traceback.
        """
        self.refusal = error
        self.is_over = True

    def _close(self, error: JaxpageError) -> None:
        """Refuses everything from now on; only the first call has an effect."""
        if not self._is_closing.acquire(blocking=False):
            return
        self.refusal = error
        self.is_over = True
        # End this future before any reader gets its error.
        self.ended.set_exception(error if isinstance(error, EngineFailed) else None)
        self._updates += [(one, copy_error(error)) for one in list(self.live.values())]
        self._send_updates()
        for answer in list(self._later):
            self.fail_later(answer, copy_error(error))
        for order in self._held:
            order.refuse(copy_error(error))
        self._refuse_orders()

    def _refuse_orders(self) -> None:
        assert self.refusal is not None
        with contextlib.suppress(queue.Empty):
            while True:
                self.inbox.get_nowait().refuse(copy_error(self.refusal))
        self.inbox.put(Order(self.stop))  # wakes a thread that waits

    def _send_updates(self) -> None:
        updates = self._updates
        self._updates = []
        send(updates)
