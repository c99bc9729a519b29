"""Takes commands from any thread, and gives answers.

A driver has one thread, which takes turns with the engine (`turns.py`). Other threads, signal
handlers and event loops post commands to it and wait for answers:

    caller ── commands ──▶ inbox ──▶ ┌ run commands ┐
                                     │ step         │  the driver's thread
    caller ◀─ updates, answers ───── └ send         ┘

An exception in a caller, such as Ctrl-C, therefore never meets a step.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from jaxpage.device import AnyEmbedder
from jaxpage.driver.handle import (
    AbortedRequests,
    Change,
    Command,
    Handle,
    PendingAnswer,
    Update,
    copy_error,
)
from jaxpage.driver.process import check_process, new_thread
from jaxpage.driver.turns import Turns
from jaxpage.engine import Engine, PreparedRequest, WakingWeights
from jaxpage.errors import ShuttingDown
from jaxpage.outputs import RequestOutput, TokenPooling
from jaxpage.step.update import RUNNING_MODES, Mode

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")

# A wait is interrupted this often, because a signal that another thread received does not end it.
WAKE_SECONDS = 0.5
# A thread that is not in the middle of a long step runs a command in this time.
COMMAND_SECONDS = 1.0


class Driver:
    """Drives an engine for many callers.

    The driver ends when it is stopped, or when nobody refers to it any more; streams and pins refer
    to it. Until `start` is called it is driven by hand: a thread that waits for something takes the
    turns.

    Attributes:
        engine: The engine.
        timeout_seconds: The time from the arrival to the end of a request; infinite without a
            limit.
        turns: The work of the driver's thread.
        is_by_hand: True until `start` is called.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_places: int | None = None,
        request_timeout_seconds: float | None = None,
        stalled_after_seconds: float = 60.0,
        max_aborted_requests: int = 0,
    ) -> None:
        """Makes a driver that is not started.

        Args:
            engine: The engine. From now on others may only call methods that change nothing, such
                as `Engine.prepare` and `Engine.compile_grammar`.
            num_places: The most requests at a time; more are refused. None means any number.
            request_timeout_seconds: The time from the arrival to the end of a request.
            stalled_after_seconds: A turn that takes longer makes `healthy` false.
            max_aborted_requests: The most aborted requests that are kept, so that they can be
                continued.
        """
        check_process()
        self.engine = engine
        self.timeout_seconds = (
            math.inf if request_timeout_seconds is None else request_timeout_seconds
        )
        self.turns = Turns(
            engine,
            num_places=num_places,
            timeout_seconds=self.timeout_seconds,
            aborted=AbortedRequests(max_aborted_requests),
        )
        self._stalled_after = stalled_after_seconds
        self._thread: threading.Thread | None = None
        self.is_by_hand = True
        # The thread refers to the turns alone, so that a driver that is dropped ends.
        # At the interpreter's exit `process._end_all` does this, and waits for the thread.
        weakref.finalize(self, self.turns.detach).atexit = False

    def start(self) -> None:
        """Starts the thread."""
        self._thread = new_thread(self.turns)
        self.is_by_hand = False
        self._thread.start()

    def step(self) -> bool:
        """Takes one turn on this thread, for a driver that was not started.

        Returns:
            True if there was anything to do.
        """
        return self.turns.turn(waits=False)

    @property
    def healthy(self) -> bool:
        """Returns whether the thread lives, and is idle or began its turn not long ago."""
        lives = self._thread is not None and self._thread.is_alive()
        return lives and not self.turns.is_over and (self.step_age or 0.0) < self._stalled_after

    @property
    def ready(self) -> bool:
        """Returns whether new requests are accepted."""
        return self.healthy and self.turns.draining is None

    @property
    def step_age(self) -> float | None:
        """Returns the seconds since this turn began, or None while there is nothing to do."""
        began = self.turns.began
        return None if began is None else time.monotonic() - began

    @property
    def termination(self) -> Future[None]:
        """Returns a future that ends with the thread; it has EngineFailed if an error ended it."""
        return self.turns.termination

    def has_ended(self) -> bool:
        """Returns whether the thread has ended; see `termination`."""
        return self.termination.done()

    @property
    def num_open(self) -> int:
        """Returns how many requests have a place; 0 if the number of places has no limit."""
        return self.turns.num_open

    def check_open(self) -> None:
        """Checks that the driver can be used.

        Raises:
            RuntimeError: This is a forked process.
            ShuttingDown: The driver was stopped.
            EngineFailed: The engine has failed.
        """
        check_process()
        if self.turns.refusal is not None:
            raise copy_error(self.turns.refusal)

    def check_awake(self) -> None:
        """Checks that the engine can be used, with the errors of `check_open`.

        Raises:
            RuntimeError: The engine sleeps.
        """
        self.check_open()
        if self.engine.is_asleep:
            raise RuntimeError("the model sleeps: call wake_up first")

    @property
    def before_step(self) -> Callable[[Callable[[], bool]], bool] | None:
        """Returns the listener that may hold the next step back, or None.

        It is called before each step with a function that tells whether commands wait, and returns
        whether to step now.
        """
        return self.turns.before_step

    @before_step.setter
    def before_step(self, listener: Callable[[Callable[[], bool]], bool] | None) -> None:
        self.turns.before_step = listener

    # Commands. Each method posts one and returns at once.

    def call(
        self, function: Callable[[Engine], _Result], *, waits_for_weights: bool = False
    ) -> PendingAnswer[_Result]:
        """Calls a function of the engine between two steps.

        It must be quick, because everybody waits for it.
        """
        answer: PendingAnswer[_Result] = PendingAnswer()
        self.turns.post(Command(function, answer, waits_for_weights))
        return answer

    def add(self, handles: Sequence[Handle], name: str = "request") -> PendingAnswer[None]:
        """Gives requests to the engine, all or none.

        A caller that does not wait for their last outputs ends them with `end`. They count as
        unfinished even while they wait for other weights. The answer comes when the engine has
        them, or when they end before that.

        Args:
            handles: The requests.
            name: The beginning of their ids, before a number.

        Raises:
            QueueFull: There are too few free places now.
            CapacityError: There are too few places for so many requests at once.
            ShuttingDown: The driver accepts no more requests.
            EngineFailed: The engine has failed. The answer may also be RequestGone.
        """
        turns = self.turns
        added: PendingAnswer[None] = PendingAnswer()
        # On this thread and before the command, so that a full driver refuses at once.
        turns.take_places(handles)
        try:
            turns.post(Command(lambda engine: turns.accept(handles, name, added), added))
        except BaseException:
            turns.end(handles)
            raise
        return added

    def find_aborted(self, name: Hashable) -> PendingAnswer[PreparedRequest]:
        """Asks for an aborted request, for a handle with this name that continues it.

        The answer may be RequestGone, or UnsupportedError for a beam search.
        """
        turns = self.turns
        return self.call(lambda engine: turns.aborted.find(name))

    def end(self, handles: Sequence[Handle]) -> None:
        """Ends requests before the next step. A finaliser may call this, on any thread."""
        self.turns.end(handles)

    def abort(self, handle: Handle) -> PendingAnswer[None]:
        """Ends a request with a last output, whatever it waits for.

        One that was not given to `add` yet ends as soon as it is.
        """
        turns = self.turns
        handle.is_aborted = True
        return self.call(lambda engine: turns.abort(handle))

    @contextlib.contextmanager
    def pinning(self, prefix: PreparedRequest) -> Iterator[PendingAnswer[int]]:
        """Computes a prefix and pins it, unless the `with` block ends with an error.

        The answer is the id of the pin. The errors are those of `add`.
        """
        pinning = Pinning(self.turns, prefix)
        try:
            self._add_answering(pinning, "prefix")
            yield pinning.pin_id
        except BaseException:
            self.call(pinning.withdraw)
            raise

    @contextlib.contextmanager
    def embedding(
        self,
        embedder: AnyEmbedder,
        prompts: Sequence[PreparedRequest],
        poolings: Sequence[TokenPooling],
    ) -> Iterator[Sequence[PendingAnswer[npt.NDArray[np.float32]]]]:
        """Computes the vectors of prompts between steps, until the end of the `with` block.

        All are computed with the same weights. The answers are a vector [D] for each prompt. The
        errors are those of `add`.

        Args:
            embedder: Computes a vector.
            prompts: The prompts.
            poolings: The pooling of each prompt; see `Embedder.embed`.
        """
        embedding = EmbeddingHandle(self.turns, embedder, prompts, poolings)
        try:
            self._add_answering(embedding, "embedding")
            yield embedding.vectors
        finally:
            self.end([embedding])

    def _add_answering(self, handle: AnsweringHandle, name: str) -> None:
        """Adds a request whose answers tell all that there is to tell."""
        self.add([handle], name).add_done_callback(handle.fail_if_refused)

    def unpin(self, pin_id: int) -> PendingAnswer[None]:
        """Releases a pin. A pin that is lost or released is no error."""
        return self.call(lambda engine: engine.unpin(pin_id))

    def is_pinned(self, pin_id: int) -> bool:
        """Returns whether a pin is in place, without waiting."""
        return not self.turns.is_over and self.engine.is_pinned(pin_id)

    def replacing(
        self,
        weights: Any,
        mode: Mode = "wait",
        checksum: str | None = None,
        *,
        tells: bool = False,
        queues: bool = False,
    ) -> contextlib.AbstractContextManager[PendingAnswer[int]]:
        """Takes other weights; see `changing`. The answer is their version.

        Args:
            weights: The weights as they are on the device.
            mode: What happens to the requests that run or wait; see `LLM.update_parameters`.
            checksum: See `Engine.replace_weights`.
            tells: See `changing`.
            queues: See `changing`.
        """
        return self.changing(
            lambda engine: engine.replace_weights(weights, mode, checksum),
            frees_weights=False,
            waits=mode not in RUNNING_MODES,
            abort=mode == "abort",
            tells=tells,
            queues=queues,
        )

    def falling_asleep(self, level: int) -> contextlib.AbstractContextManager[PendingAnswer[None]]:
        """Has the engine sleep once nothing runs; see `changing` and `Engine.sleep`.

        Requests that come in meanwhile wait until it is woken.
        """
        return self.changing(lambda engine: engine.sleep(level), frees_weights=True)

    @contextlib.contextmanager
    def changing(
        self,
        function: Callable[[Engine], _Result],
        *,
        frees_weights: bool,
        waits: bool = True,
        abort: bool = False,
        tells: bool = False,
        queues: bool = False,
    ) -> Iterator[PendingAnswer[_Result]]:
        """Changes the weights, mostly once nothing runs. Requests that come in meanwhile wait.

        The end of the `with` block takes back a change that was not made.

        Args:
            function: Makes the change.
            frees_weights: True if the change also waits for vectors that are computed; see
                `Change`.
            waits: False makes the change before the next step, while requests run.
            abort: True ends the running and waiting requests, and does not wait for them.
            tells: True ends them with WeightsReplaced, False with a last output. Vectors end with
                WeightsReplaced in either case.
            queues: True waits if another change is under way; False then raises an error.
        """
        turns = self.turns
        change = Change(function, frees_weights=frees_weights, waits=waits)

        def begin(engine: Engine) -> object:
            return turns.begin_change(change, abort=abort, tells=tells)

        try:
            turns.post(Command(begin, change.answer, waits_for_weights=queues))
            yield change.answer
        finally:
            change.withdraw()

    def wake(self, weights: WakingWeights) -> PendingAnswer[None]:
        """Wakes the engine with its weights as they are on the device; see `Engine.wake`."""
        turns = self.turns
        return self.call(lambda engine: turns.wake(weights))

    def pause(self) -> PendingAnswer[None]:
        """Has no step run until `resume`. Requests are accepted and kept."""
        turns = self.turns
        return self.call(lambda engine: turns.pause())

    def resume(self) -> PendingAnswer[None]:
        """Has steps run again; the answer is RuntimeError if they were not paused."""
        turns = self.turns
        return self.call(lambda engine: turns.resume())

    @property
    def is_paused(self) -> bool:
        """Returns whether steps are paused."""
        return self.turns.is_paused

    def weights(self) -> PendingAnswer[Any]:
        """Asks for the weights of the model and of its drafter; see `Engine.share_weights`."""
        return self.call(Engine.share_weights)

    def drain(self, subject: str = "The engine") -> PendingAnswer[None]:
        """Accepts no more requests, and answers when none is left. A pause ends with it.

        Args:
            subject: The thing that is shutting down, for the error of later requests.
        """
        turns = self.turns
        answer = PendingAnswer[None]()
        # Here and not in the command: from now on other threads may add nothing.
        turns.draining = turns.draining or ShuttingDown(f"{subject} is shutting down")
        turns.post(Command(lambda engine: turns.begin_drain(answer), answer))
        return answer

    def end_late(self, subject: str = "The engine") -> PendingAnswer[int]:
        """Ends every request that a drain has waited for too long; for `subject` see `drain`.

        The answer is the number of those requests.
        """
        turns = self.turns
        why = ShuttingDown(f"{subject} is shutting down; the time to finish was over")
        return self.call(lambda engine: turns.end_all(why))

    def fail(self, death: BaseException) -> None:
        """Ends everything with EngineFailed, even while a step runs that may never end."""
        self.turns.fail(death)

    def stop(self, timeout: float | None = None) -> bool:
        """Ends everything and frees the device.

        Returns:
            False if the thread still runs a step after `timeout` seconds.
        """
        turns = self.turns
        thread = self._thread
        turns.post(Command(turns.stop))
        if thread is None:
            # There is no thread that would run the command to stop.
            if not turns.is_over:
                turns.run()
            return True
        if thread is not threading.current_thread():
            thread.join(timeout)
        return not thread.is_alive()

    # Waiting, on the thread of a caller.

    def wait(self, answer: PendingAnswer[_Result], timeout: float | None = None) -> _Result:
        """Returns the answer to a command, or raises its error.

        Raises:
            TimeoutError: There is no answer after `timeout` seconds.
        """
        self.wait_for_item(answer.box, timeout)
        return answer.result()

    def wait_for_item(self, box: queue.SimpleQueue[_Item], timeout: float | None = None) -> _Item:
        """Returns the next item of a box that the driver fills.

        Raises:
            TimeoutError: There is no item after `timeout` seconds.
            RuntimeError: The driver would wait for itself, or has nothing left to do.
        """
        check_process()
        if self.turns.running_thread == threading.get_ident():
            raise RuntimeError(
                "this LLM was called from a finaliser or a callback in the middle of its own step, "
                "which cannot go on before the call returns: call it from another thread"
            )
        ends = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            while self.is_by_hand and box.empty() and time.monotonic() < ends:
                # Commands go first: one of them may be waited for, and needs no step.
                if self.turns.run_commands() or self.step():
                    continue
                if timeout is None:
                    raise RuntimeError("nothing is left to do, but what is waited for has not come")
                break
            # The time may be over already, and `get` refuses a timeout below 0.
            left = min(ends - time.monotonic(), WAKE_SECONDS)
            try:
                return box.get(timeout=max(left, 0.0))
            except queue.Empty:
                if time.monotonic() >= ends:
                    raise TimeoutError(f"the engine has not answered for {timeout:g} s") from None

    def drain_for(self, timeout: float | None) -> bool:
        """Drains on the thread of a caller; see `drain`.

        Args:
            timeout: The seconds after which unfinished requests end with ShuttingDown; None waits
                without a limit. If a step takes long, they end before the next one.

        Returns:
            True if all requests finished.
        """
        try:
            self.wait(self.drain(), timeout)
        except TimeoutError:
            try:
                return self.wait(self.end_late(), COMMAND_SECONDS) == 0
            except TimeoutError:
                return False
        return True

    def read(self, function: Callable[[Engine], _Result]) -> _Result:
        """Returns the result of a function that is called between two steps.

        It is called at once on the thread that takes a turn, and after the driver's end. So the
        function must change nothing.
        """
        if self.turns.is_over or self.turns.running_thread == threading.get_ident():
            return function(self.engine)
        return self.wait(self.call(function))


class AnsweringHandle(Handle):
    """Follows a request that has answers, which all get an error if it ends before."""

    def __init__(
        self, turns: Turns, request: PreparedRequest, answers: Sequence[PendingAnswer[Any]]
    ) -> None:
        super().__init__(request, self._fail_if_ended)
        self._turns = turns
        self._answers = answers
        for answer in answers:
            # It counts as running, so that a waiter that is cancelled does not cancel it while the
            # driver's thread is about to fill it.
            answer.set_running_or_notify_cancel()

    def fail_if_refused(self, added: Future[None]) -> None:
        """Passes on the error with which the driver refused the request, if it did."""
        if (error := added.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Gives an error to the answers that have nothing yet."""
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(error)

    def _fail_if_ended(self, updates: Sequence[Update]) -> None:
        for _, update in updates:
            if isinstance(update, RequestOutput):
                reason = update.outputs[0].stop_reason
                self.fail(RuntimeError(f"the prefix could not be computed: {reason}"))
            else:
                self.fail(update)


class Pinning(AnsweringHandle):
    """Follows a prefix that is computed, and pinned after the step that ends its computation.

    Attributes:
        pin_id: Gets the id of the pin.
    """

    def __init__(self, turns: Turns, prefix: PreparedRequest) -> None:
        self.pin_id: PendingAnswer[int] = PendingAnswer()
        super().__init__(turns, prefix._replace(is_prefix=True), [self.pin_id])

    def withdraw(self, engine: Engine) -> None:
        """Ends the computation, or releases the pin if it is there already."""
        self._turns.end_one(self)
        if self.pin_id.done() and not self.pin_id.exception():
            engine.unpin(self.pin_id.result())

    def news(self) -> RequestOutput | None:
        """Pins the prefix when its first token is drawn. Returns an output only if it fails."""
        reporter = self.reporter
        if reporter is None or self.pin_id.done():
            return None
        if reporter.finished:
            return reporter.whole()
        if reporter.num_output_tokens:
            try:
                pin_id = self._turns.engine.pin(self.request_id)
            except Exception as error:
                self.fail(error)
            else:
                self.pin_id.set_result(pin_id)
            self._turns.end_one(self)
        return None


class EmbeddingHandle(AnsweringHandle):
    """Follows prompts whose vectors are computed, a batch in each turn, all with the same weights.

    Attributes:
        vectors: The answers, each of which gets the vector [D] of a prompt.
    """

    needs_place = False

    def __init__(
        self,
        turns: Turns,
        embedder: AnyEmbedder,
        prompts: Sequence[PreparedRequest],
        poolings: Sequence[TokenPooling],
    ) -> None:
        self.vectors: list[PendingAnswer[npt.NDArray[np.float32]]] = [
            PendingAnswer() for _ in prompts
        ]
        # A handle has a request; the engine never gets this one (`begin`).
        super().__init__(turns, prompts[0], self.vectors)
        self._embedder = embedder
        self._prompts = prompts
        self._poolings = poolings
        # Turned around, because batches are taken from the end.
        self._remaining = embedder.batches([len(prompt.token_ids) for prompt in prompts])[::-1]
        self._weights: Any = None

    @property
    def reads_weights(self) -> bool:
        """Returns whether vectors are still computed; see `Handle.reads_weights`."""
        return self._weights is not None and not self.is_over

    def begin(self, engine: Engine) -> None:
        """Takes the weights of now for all vectors, and computes the first in the next turn."""
        self._weights = engine.parameters["target"]
        self._turns.post(Command(self._compute, is_step=True))

    def _compute(self, engine: Engine) -> None:
        """Computes a batch between two steps, and posts the command for the next one."""
        if self.is_over:
            return
        try:
            places = self._remaining.pop()
            vectors = self._embedder.embed(
                self._weights,
                [self._prompts[place].token_ids for place in places],
                [self._poolings[place] for place in places],
            )
            for place, vector in zip(places, vectors, strict=True):
                self.vectors[place].set_result(vector)
            if self._remaining:
                self._turns.post(Command(self._compute, is_step=True))
                return
        except Exception as error:
            self.fail(error)
        self._turns.end_one(self)
