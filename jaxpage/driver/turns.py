"""Takes the turns of a driver: runs commands, runs a step, and sends the outputs.

All methods but `num_open`, `post`, `want`, `end`, `detach`, `take_places` and `fail` run on the
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from jaxpage.driver.handle import (
    LATER,
    AbortedRequests,
    Change,
    Command,
    Handle,
    PendingAnswer,
    RequestPlaces,
    Update,
    copy_error,
    seconds_to_deadline,
    send,
)
from jaxpage.engine import Engine, WakingWeights
from jaxpage.errors import (
    DeadlineExceeded,
    EngineFailed,
    JaxpageError,
    ShuttingDown,
    WeightsReplaced,
)

logger = logging.getLogger(__name__)


class Turns:
    """Does everything that a driver's thread does.

    The methods for other threads take no lock: a finaliser or a signal handler may call them in the
    middle of another of them, on the same thread.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_places: int | None,
        timeout_seconds: float,
        aborted: AbortedRequests,
    ) -> None:
        """Makes the turns of an engine.

        Args:
            engine: The engine, which belongs to the turns from now on.
            num_places: The most requests at a time; None means any number.
            timeout_seconds: The time of a request that has a deadline, for the message.
            aborted: Keeps requests that were aborted.
        """
        self.engine = engine
        self.aborted = aborted
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        # This future ends with the turns. If an exception ended them, it has EngineFailed with that
        # cause.
        self.termination: Future[None] = Future()
        # The future counts as running, so that a waiter that is cancelled does not cancel it for
        # others.
        self.termination.set_running_or_notify_cancel()
        self.began: float | None = None  # the start of this turn; None if there is nothing to do
        self.before_step: Callable[[Callable[[], bool]], bool] | None = None
        # All requests by id, from their acceptance to their end: those that run, and those that
        # wait for other weights. Whatever asks what is unfinished asks here.
        self.live: dict[str, Handle] = {}
        self.change: Change[Any] | None = None
        self.draining: ShuttingDown | None = None  # why new requests are refused
        self.refusal: JaxpageError | None = None  # why everything is refused
        self.is_over = False  # nobody reads the inbox any more
        self.is_paused = False  # no step runs until `resume`
        self.running_thread: int | None = None  # the thread that takes a turn now
        self._places = RequestPlaces(num_places)
        self._timeout_seconds = timeout_seconds
        self._numbers = itertools.count()
        self._updates: list[Update] = []
        self._drained: list[PendingAnswer[None]] = []
        self._later: set[PendingAnswer[Any]] = set()  # the answers that will come later
        self._held: list[Command] = []  # commands that wait for other weights, or for `resume`
        self._accepts = True  # no drain has begun
        self._is_stopping = False
        self._keeps_engine = False
        self._is_closing = threading.Lock()  # is acquired once and never released

    # Methods for any thread.

    @property
    def num_open(self) -> int:
        """Returns how many requests have a place; 0 if the number of places has no limit."""
        return self._places.num_taken

    def post(self, command: Command) -> None:
        """Puts a command into the inbox. It is refused if nobody reads the inbox any more."""
        self.inbox.put(command)
        # Check after the put: the thread that closes the inbox sets `is_over` first and then
        # empties it.
        if self.is_over:
            self._refuse_commands()

    def want(self, handle: Handle) -> None:
        """Asks for the next output of a request; raises the error that ended the driver, if any."""
        self.post(Command(lambda engine: self._want(handle)))
        if self.is_over and self.refusal is not None:
            raise copy_error(self.refusal)

    def end(self, handles: Iterable[Handle]) -> None:
        """Notes requests that end before the next step. Requests that have ended are no error."""
        unfinished = [handle for handle in handles if not handle.is_over]
        if unfinished:
            self.inbox.put(Command(lambda engine: self._end_each(unfinished)))

    def detach(self) -> None:
        """Ends the turns, and leaves the engine as it is. Later commands are refused."""
        self.inbox.put(Command(self._detach))

    def take_places(self, handles: Sequence[Handle]) -> None:
        """Takes a place for each request, all or none. Ending a request gives its place back.

        Raises:
            JaxpageError: New requests are refused.
            CapacityError: There are too few places for so many requests at once.
            QueueFull: There are too few free places now.
        """
        if (refusal := self.refusal or self.draining) is not None:
            raise copy_error(refusal)
        self._places.take(handles)

    def fail(self, death: BaseException) -> None:
        """Ends everything with EngineFailed, even while a step runs that may never end."""
        error = EngineFailed("The engine has failed")
        error.__cause__ = death  # as a cause only, because a SystemExit would end an event loop
        self._close(error)

    # Methods for the thread that takes the turns.

    def run(self) -> None:
        """Takes turns until a command ends them."""
        error = ShuttingDown("The engine was shut down")
        try:
            while not self._is_stopping:
                self.turn()
            if self._keeps_engine:
                # After the last reference is gone nobody waits for answers to earlier commands.
                # At the interpreter's exit only threads wait that end anyway, and an error would
                # make them print a traceback.
                self.refusal = error
                self.is_over = True
                return
            self.end_all(error)
            self.close_engine()
            self._close(error)
        except BaseException as death:
            logger.critical("the engine's thread has died", exc_info=death)
            self.fail(death)

    def turn(self, *, waits: bool = True) -> bool:
        """Runs the commands in the inbox, runs a step, and sends the outputs.

        Args:
            waits: True waits for a command if there is nothing to do.

        Returns:
            True if there was anything to do.
        """
        self.running_thread = threading.get_ident()
        try:
            return self._turn(waits)
        finally:
            self.running_thread = None

    def _turn(self, waits: bool) -> bool:
        if has_changed := self._change_weights():
            self._send_updates()  # those of requests that were refused when the weights came
        if not self._can_step:
            self.began = None
            if not waits and self.inbox.empty():
                return has_changed
            with contextlib.suppress(queue.Empty):
                # A request has its deadline also in a pause, or while it waits for other weights.
                self._run_command(self.inbox.get(timeout=seconds_to_deadline(self.live.values())))
        self.began = time.monotonic()
        # Only those that are there now: whoever posts without end must not hold up the step.
        for _ in range(self.inbox.qsize()):
            self._run_command(self.inbox.get())
        self._end_what_is_late()
        if self._can_step and not self._is_stopping and self._may_step():
            self._step()
        self._send_updates()
        return True

    def run_commands(self) -> bool:
        """Runs the commands in the inbox without a step, and returns whether there were any."""
        number = self.inbox.qsize()
        for _ in range(number):
            self._run_command(self.inbox.get())
        self._send_updates()
        return number > 0

    @property
    def _has_work(self) -> bool:
        """Returns whether a request of this driver is unfinished."""
        return bool(self.live) and self.engine.has_unfinished

    @property
    def _can_step(self) -> bool:
        return self._has_work and not self.is_paused

    def _may_step(self) -> bool:
        return self.before_step is None or self.before_step(lambda: not self.inbox.empty())

    @property
    def _awaits_weights(self) -> bool:
        """Returns whether other weights are on their way, or the engine sleeps."""
        return self.change is not None or self.engine.is_asleep

    def _run_command(self, command: Command) -> None:
        awaits_weights = command.waits_for_weights and self._awaits_weights
        if awaits_weights or (command.is_step and self.is_paused):
            self._held.append(command)
        else:
            command.run(self.engine)

    def _step(self) -> None:
        try:
            groups = self.engine.step()
        except Exception as error:
            self._recover(error)
            return
        for group in groups:
            handle = self.live.get(group.request.request_id)
            if handle is not None:
                handle.is_updated = True
                self._offer(handle)

    def _recover(self, error: Exception) -> None:
        """Ends all requests after a step that raised an error outside the engine's own handling.

        The block tables may have what the step moved while the pages lack it, so the pages are made
        anew. If a request or a block is left over afterwards, the driver ends.
        """
        logger.error("a step failed; all requests end with an error", exc_info=error)
        failure = EngineFailed("The engine failed during generation")
        failure.__cause__ = error
        for handle in list(self.live.values()):
            # Requests without a reporter are not in the engine: its failure does not touch them.
            if handle.reporter is not None:
                self.end_one(handle, copy_error(failure))
        self.engine.abort_all()
        self.engine.rebuild_pages()
        stats = self.engine.stats()
        num_left = stats["num_blocks_free"] + stats["num_blocks_pinned"]
        if self.engine.has_unfinished or num_left != stats["num_blocks_total"]:
            raise RuntimeError("KV blocks were not freed after a failed step") from error

    def accept(self, handles: Sequence[Handle], name: str, added: PendingAnswer[None]) -> object:
        """Takes requests in, all or none; they count as unfinished from now on.

        The engine gets them now, or when the weights have come that are awaited.

        Args:
            handles: The requests.
            name: The beginning of their ids, before a number.
            added: Gets None when the engine has them, or the error of `Engine.add`.

        Raises:
            ShuttingDown: A drain has begun.
            RequestGone: One continues a request that is not kept any more.
        """
        if not self._accepts:
            assert self.draining is not None
            raise copy_error(self.draining)
        if not handles:
            return None  # nobody else would answer
        for handle in handles:
            handle.request_id = f"{name}-{next(self._numbers)}"
            handle.added = added
        self.aborted.give(handles, self.live)
        self.live.update((handle.request_id, handle) for handle in handles)
        self._later.add(added)
        if self._awaits_weights:
            # Those get their last output now, and wait for no weights.
            self._begin([handle for handle in handles if handle.is_aborted])
        self._run_command(Command(lambda engine: self._begin(handles), waits_for_weights=True))
        return LATER

    def _begin(self, handles: Sequence[Handle]) -> None:
        """Gives accepted requests to the engine, all or none, but for those that have ended."""
        begun = [handle for handle in handles if not handle.is_over and handle.added is not None]
        try:
            for handle in begun:
                handle.begin(self.engine)
        except Exception as error:
            self._refuse(begun, error)
            return
        for handle in begun:
            self._answer_added(handle)
            if handle.is_aborted:
                self.abort(handle)

    def _refuse(self, handles: Sequence[Handle], error: Exception) -> None:
        """Ends requests of one call of `accept` that the engine has refused.

        The caller of `accept` gets the error, or each reader if that caller waits no longer.
        """
        caller_waits = any(handle.added in self._later for handle in handles)
        failure = error if isinstance(error, JaxpageError) else EngineFailed("A request failed")
        if failure is not error:
            failure.__cause__ = error
        for handle in handles:
            # Its reader gets no last output, as if the engine never had the request.
            handle.reporter = None
            self.fail_later(handle.added, error)
            self.end_one(handle, None if caller_waits else copy_error(failure))

    def _answer_added(self, handle: Handle) -> None:
        added = handle.added
        handle.added = None
        if added is not None:
            self.answer(added, None)

    def abort(self, handle: Handle) -> None:
        """Ends a request with a last output, even if it waits for other weights.

        If the request comes later, it ends then. One that has ended is no error.
        """
        handle.is_aborted = True
        if handle.is_over:
            return
        if handle.added is not None:
            self._begin([handle])
            return
        self.aborted.keep_of(handle, self.engine.abort(handle.request_id))
        handle.is_updated = True
        self._offer(handle)

    def _want(self, handle: Handle) -> None:
        handle.is_requested = True
        self._offer(handle)

    def _offer(self, handle: Handle) -> None:
        """Makes the next output of a request, if its reader wants one now (see `Handle`)."""
        try:
            output = handle.news()
        except Exception as error:
            logger.error(
                "the output of request %s cannot be reported", handle.request_id, exc_info=error
            )
            failure = EngineFailed("The engine failed to report the output")
            failure.__cause__ = error
            self.end_one(handle, failure)
            return
        if output is None:
            return
        self._updates.append((handle, output))
        if output.finished:
            self.end_one(handle)

    def _end_what_is_late(self) -> None:
        if math.isinf(self._timeout_seconds):
            return
        now = time.monotonic()
        for handle in list(self.live.values()):
            if handle.is_unfinished and handle.deadline < now:
                self.end_one(handle, self.too_late())

    def too_late(self) -> DeadlineExceeded:
        """Returns the error of a request whose time is over."""
        return DeadlineExceeded(f"The request did not finish within {self._timeout_seconds:g} s")

    def _end_each(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            self.end_one(handle)

    def end_one(self, handle: Handle, why: JaxpageError | None = None) -> None:
        """Ends a request; its place and blocks are free from now on.

        Args:
            handle: The request. One that has ended or was never accepted has nothing to give back.
            why: The error for its reader. If it is None, a reader that waits gets a last output,
                unless the engine never had the request.
        """
        if handle.is_over:
            return
        # This comes first, because `_offer` ends a request that has finished by calling this again.
        handle.is_over = True
        self._places.give_back(handle)
        if self.live.pop(handle.request_id, None) is not None:
            self.aborted.keep_of(handle, self.engine.abort(handle.request_id), why)
        self._answer_added(handle)
        if why is not None:
            self._updates.append((handle, why))
        else:
            handle.is_updated = True
            self._offer(handle)
        self._answer_drains()

    def end_all(self, why: JaxpageError) -> int:
        """Ends every request with a copy of an error, and returns how many there were."""
        handles = list(self.live.values())
        for handle in handles:
            self.end_one(handle, copy_error(why))
        return len(handles)

    def begin_drain(self, answer: PendingAnswer[None]) -> object:
        """Gives the answer when no request is left. It ends a pause, which would keep them."""
        self._accepts = False
        if self.is_paused:
            self.resume()
        self._drained.append(answer)
        self._later.add(answer)
        self._answer_drains()
        return LATER

    def _answer_drains(self) -> None:
        while self._drained and not self.live:
            self.answer(self._drained.pop(), None)

    def answer(self, answer: PendingAnswer[Any], result: Any) -> None:
        """Gives an answer that came later, unless it was given already."""
        if answer in self._later:
            self._later.remove(answer)
            answer.set_result(result)

    def fail_later(self, answer: PendingAnswer[Any] | None, error: Exception) -> None:
        """Gives an error as an answer that came later, unless the answer was given already."""
        if answer in self._later:
            self._later.remove(answer)
            answer.set_exception(error)

    def begin_change(self, change: Change[Any], *, abort: bool, tells: bool) -> object:
        """Makes a change, or holds it until nothing runs; later requests wait for it.

        Args:
            change: The change.
            abort: True ends the running and waiting requests, and does not wait for them.
            tells: True ends them with WeightsReplaced, False with a last output. Vectors end with
                WeightsReplaced in either case.
        """
        self._change_weights()  # if the one before was withdrawn in this turn, it is gone now
        if self.change is not None:
            raise RuntimeError("Other weights, or sleep, are on their way already")
        if abort and not change.is_withdrawn:
            why = WeightsReplaced("The request was ended: the model gets other weights")
            for handle in list(self.live.values()):
                if handle.reads_weights:  # vectors have no last output
                    self.end_one(handle, copy_error(why))
                elif handle.reporter is not None:
                    self.end_one(handle, copy_error(why) if tells else None)
        if self.is_paused and not (change.is_withdrawn or self._is_ready(change)):
            raise RuntimeError(
                f"this waits for requests to finish, and the engine is paused with "
                f"{len(self.live)} of them: resume it or abort them first, or update the weights "
                "with the mode keep or recompute"
            )
        self.change = change
        self._later.add(change.answer)
        self._change_weights()
        return LATER

    def _change_weights(self) -> bool:
        """Makes the change if nothing is in its way, and then runs the commands that waited for it.

        Returns:
            True if a change waited and does not wait any more: it was made, refused or withdrawn.
        """
        change = self.change
        if change is None or not (change.is_withdrawn or self._is_ready(change)):
            return False
        self.change = None
        try:
            if change.is_withdrawn:
                raise RuntimeError("The weights were taken back")
            result = change.function(self.engine)
        except Exception as error:
            self.fail_later(change.answer, error)
        else:
            self.answer(change.answer, result)
        self._run_held()
        return True

    def _is_ready(self, change: Change[Any]) -> bool:
        """Returns whether no request stands in the way of a change."""
        if not change.waits:
            return True
        is_read = any(handle.reads_weights for handle in self.live.values())
        return not self._has_work and not (is_read and change.frees_weights)

    def wake(self, weights: WakingWeights) -> None:
        """Wakes the engine with its weights, and then runs the commands that waited for it."""
        self.engine.wake(weights)
        self._run_held()

    def pause(self) -> None:
        """Has no step run until `resume`; a second call does nothing.

        Raises:
            ShuttingDown: A drain has begun.
        """
        if not self._accepts:
            assert self.draining is not None
            raise copy_error(self.draining)
        self.is_paused = True

    def resume(self) -> None:
        """Has steps run again.

        Raises:
            RuntimeError: They were not paused.
        """
        if not self.is_paused:
            raise RuntimeError("the engine is not paused, so it cannot be resumed")
        self.is_paused = False
        self._run_held()

    def _run_held(self) -> None:
        # A new list takes those that must be held again.
        held = self._held
        self._held = []
        for command in held:
            self._run_command(command)

    def close_engine(self) -> None:
        """Frees the device."""
        self.engine.abort_all()
        self.engine.report_end()
        self.engine.close()

    def stop(self, engine: Engine) -> None:
        """Ends the turns after this one; this is the function of a command."""
        self._is_stopping = True

    def _detach(self, engine: Engine) -> None:
        self._is_stopping = self._keeps_engine = True

    def _close(self, error: JaxpageError) -> None:
        """Refuses everything from now on; only the first call has an effect."""
        if not self._is_closing.acquire(blocking=False):
            return
        self.refusal = error
        self.is_over = True
        # End this future before any reader gets its error.
        # A future with None for its exception has ended well.
        self.termination.set_exception(error if isinstance(error, EngineFailed) else None)
        self._updates += [(handle, copy_error(error)) for handle in list(self.live.values())]
        self._send_updates()
        for answer in list(self._later):
            self.fail_later(answer, copy_error(error))
        for command in self._held:
            command.refuse(copy_error(error))
        self._refuse_commands()

    def _refuse_commands(self) -> None:
        assert self.refusal is not None
        with contextlib.suppress(queue.Empty):
            while True:
                self.inbox.get_nowait().refuse(copy_error(self.refusal))
        self.inbox.put(Command(self.stop))  # wakes a thread that waits

    def _send_updates(self) -> None:
        updates = self._updates
        self._updates = []
        send(updates)
