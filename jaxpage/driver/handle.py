"""Defines the commands to a driver with their answers, and the handles of its requests.

It also counts the places that requests take, and keeps the requests that were aborted last.
"""

from __future__ import annotations

import copy
import math
import queue
import time
from collections import defaultdict, deque
from collections.abc import Callable, Container, Hashable, Iterable
from concurrent.futures import Future
from typing import Any, Final, Generic, NamedTuple, TypeVar

from jaxpage.engine import Engine, PreparedRequest, Reporter
from jaxpage.errors import (
    CapacityError,
    EngineFailed,
    JaxpageError,
    QueueFull,
    RequestGone,
    ShuttingDown,
    UnsupportedError,
)
from jaxpage.outputs import RequestMetrics, RequestOutput
from jaxpage.step.aborted import AbortedRequest

_Result = TypeVar("_Result")
_Error = TypeVar("_Error", bound=JaxpageError)

# A function returns this if the answer to its command comes later.
LATER: Final = object()


class PendingAnswer(Future[_Result]):
    """Holds the future answer to a command.

    An event loop awaits it with `asyncio.wrap_future`. A thread waits for its box and not for the
    future: a signal handler of the program may run at any moment of a wait, and must not run while
    this thread has the lock of a future that the driver's thread is about to fill.
    """

    def __init__(self) -> None:
        super().__init__()
        self.box = box = queue.SimpleQueue[None]()
        self.add_done_callback(lambda answer: box.put(None))


class Command(NamedTuple):
    """Holds a function of the engine, and the answer that gets what it returns or raises.

    Attributes:
        function: The function, which the driver calls between two steps.
        answer: Gets the result. If it is None, nobody waits, and an exception ends the driver.
        waits_for_weights: True if the command waits while other weights are on their way, or while
            the engine sleeps.
        is_step: True if the command computes on the device, so that it waits while steps are
            paused.
    """

    function: Callable[[Engine], Any]
    answer: PendingAnswer[Any] | None = None
    waits_for_weights: bool = False
    is_step: bool = False

    def run(self, engine: Engine) -> None:
        """Calls the function, unless the answer was cancelled."""
        if self.answer is None:
            self.function(engine)
        elif self.answer.set_running_or_notify_cancel():
            try:
                result = self.function(engine)
            except Exception as error:
                self.answer.set_exception(error)
            else:
                if result is not LATER:
                    self.answer.set_result(result)

    def refuse(self, error: Exception) -> None:
        """Answers with an error, since the command is never run."""
        if self.answer is not None and self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)


class Change(Generic[_Result]):
    """Holds a change of the weights, such as other ones or sleep.

    Attributes:
        function: Makes the change.
        frees_weights: True if the weights are gone afterwards, so that the change also waits for
            requests that only read them.
        waits: True if the change waits until nothing runs.
        answer: Gets what the function returns or raises.
        is_withdrawn: True if nobody waits for the change any more.
    """

    def __init__(
        self, function: Callable[[Engine], _Result], *, frees_weights: bool, waits: bool = True
    ) -> None:
        self.function = function
        self.frees_weights = frees_weights
        self.waits = waits
        self.answer: PendingAnswer[_Result] = PendingAnswer()
        self.is_withdrawn = False

    def withdraw(self) -> None:
        """Takes the change back, unless it was made already."""
        self.is_withdrawn = True


def copy_error(error: _Error) -> _Error:
    """Returns a copy of the error for one more receiver.

    Each receiver raises its own copy: raising one object in several places would lengthen one
    traceback for all of them. The cause and the notes are kept.
    """
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    copied.__traceback__ = None
    return copied


class Handle:
    """Holds a request, and delivers its new outputs.

    The output of a request is made on the driver's thread: either whole, when the request has
    finished, or as deltas. A delta is either pushed after each step that changed the request, or
    made when the reader asks for one, for all steps since the last. With the second way a slow
    reader costs nothing but the place of its request, and gets what it has missed in deltas of a
    bounded size.

    Attributes:
        request_id: The id that the driver gave the request; empty until then.
        request: The request as it was prepared.
        deadline: The time when the driver ends the request, by `time.monotonic`.
        deliver: Gets lists of updates, on the driver's thread. Updates of handles whose `deliver`
            is equal come in one list.
        is_stream: True if the reader gets deltas; False if it gets the whole at the end.
        is_requested: True while the reader waits for an output.
        is_updated: True if the request has changed since the last delta.
        is_over: True if the request has ended, and its place and its blocks are free.
        is_aborted: True if the request ends with a last output as soon as the driver has it.
        has_place: True while the request has a place of the driver.
        added: Gets None when the engine has the request; it is pending while other weights are
            awaited. None if nobody waits for that.
        max_entries: The bound of an output that is made on the driver's thread; see `Reporter`.
            None where nobody but the reader waits for that thread.
        reporter: Makes the outputs, once the engine has the request.
        weights_version: The version of the weights that the request began with.
        is_kept: True if the request can be continued after it was aborted.
        name: The id by which its caller knows it; None if that is `request_id`.
    """

    needs_place = True  # a driver has so many places

    def __init__(
        self,
        request: PreparedRequest,
        deliver: Callable[[list[Update]], object],
        *,
        is_stream: bool = False,
        is_pushed: bool = True,
        deadline: float = math.inf,
        max_entries: int | None = None,
        is_kept: bool = False,
        name: Hashable | None = None,
    ) -> None:
        self.request_id = ""
        self.is_kept = is_kept
        self.name = name
        self.request = request
        self.deadline = deadline
        self.deliver = deliver
        self.is_stream = is_stream
        self.is_requested = self._is_pushed = is_pushed
        self.is_updated = self.is_over = self.is_aborted = self.has_place = False
        self.added: PendingAnswer[None] | None = None
        self.max_entries = max_entries
        self.reporter: Reporter | None = None
        self.weights_version = 0

    def begin(self, engine: Engine) -> None:
        """Gives the request to the engine; it raises the same errors as `Engine.add`."""
        self.reporter = engine.add(self.request_id, self.request)
        self.weights_version = self.reporter.first_weights_version

    @property
    def continues(self) -> bool:
        """Returns whether it goes on with an aborted request, which is kept by its name."""
        return self.request.aborted is not None

    @property
    def reads_weights(self) -> bool:
        """Returns whether the request reads weights that it took before; they must stay in place.

        The engine's own requests do not: they are in `Engine.has_unfinished`.
        """
        return False

    @property
    def is_unfinished(self) -> bool:
        """Returns whether the request has something to wait for, so that it can be late."""
        return self.reporter is None or not self.reporter.finished

    @property
    def num_output_tokens(self) -> int:
        """Returns how many tokens all sequences of the request have drawn."""
        return 0 if self.reporter is None else self.reporter.num_output_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Returns how many tokens of the prompt are computed; any thread may ask."""
        return 0 if self.reporter is None else self.reporter.num_computed_tokens

    @property
    def metrics(self) -> RequestMetrics | None:
        """Returns the times and counts of the request; None until the engine has it."""
        return None if self.reporter is None else self.reporter.metrics

    def news(self) -> RequestOutput | None:
        """Returns the next delta or the whole output, if the reader wants it and it is there."""
        reporter = self.reporter
        if reporter is None or not self.is_requested:
            return None
        if not (self.is_updated if self.is_stream else reporter.finished):
            return None
        self.is_requested = self._is_pushed and not reporter.finished
        reporter.max_entries = self.max_entries
        output = reporter.delta() if self.is_stream else reporter.whole()
        self.is_updated = reporter.has_unsent
        return output


Update = tuple[Handle, RequestOutput | JaxpageError]


def seconds_to_deadline(handles: Iterable[Handle]) -> float | None:
    """Returns the seconds until a request is late, at least 0; None if none can be."""
    first = min((handle.deadline for handle in handles if handle.is_unfinished), default=math.inf)
    return None if math.isinf(first) else max(0.0, first - time.monotonic())


def send(updates: Iterable[Update]) -> None:
    """Calls each receiver once, with all updates of its requests."""
    by_receiver: defaultdict[Callable[[list[Update]], object], list[Update]] = defaultdict(list)
    for update in updates:
        by_receiver[update[0].deliver].append(update)
    for deliver, items in by_receiver.items():
        deliver(items)


class RequestPlaces:
    """Holds the free places.

    Any thread may take one, even in the middle of another call on the same thread, so there is no
    lock.
    """

    def __init__(self, number: int | None) -> None:
        """Makes so many places; None means any number."""
        self._number = number
        # `deque.pop` is atomic, which a counter would not be without a lock.
        self._free = deque([None] * (number or 0))  # each request takes one out

    @property
    def num_taken(self) -> int:
        """Returns how many are taken; 0 if their number has no limit."""
        return (self._number or 0) - len(self._free)

    def take(self, handles: Iterable[Handle]) -> None:
        """Takes a place for each request that needs one, all or none.

        Raises:
            CapacityError: There are too few places for so many requests at once.
            QueueFull: There are too few free places now.
        """
        if self._number is None:
            return
        placed = [handle for handle in handles if handle.needs_place]
        number = len(placed)
        if number > self._number:
            raise CapacityError(
                f"{number} requests at once; max_num_seqs + max_queued_requests is {self._number}"
            )
        num_taken = 0
        try:
            while num_taken < number:
                self._free.pop()
                num_taken += 1
        except IndexError:
            # All or none: the places of the others go back.
            self._free.extend([None] * num_taken)
            raise QueueFull(
                f"{self.num_taken} requests run or wait, and there are {self._number} places; "
                "try again later"
            ) from None
        for handle in placed:
            handle.has_place = True

    def give_back(self, handle: Handle) -> None:
        """Gives up the place of a request that has ended, if it had one."""
        if handle.has_place:
            handle.has_place = False
            self._free.append(None)


class AbortedRequests:
    """Holds aborted requests by the ids that their callers know.

    Only the thread that takes the turns uses it.
    """

    def __init__(self, maximum: int) -> None:
        """Keeps at most so many requests, those that were aborted last."""
        self._maximum = maximum
        self._requests: dict[Hashable, PreparedRequest] = {}

    def keep(self, name: Hashable, request: PreparedRequest) -> None:
        """Keeps a request, in place of an older one with the same id."""
        # Out and in again, so that it is the last to be dropped.
        self._requests.pop(name, None)
        self._requests[name] = request
        while len(self._requests) > self._maximum:
            del self._requests[next(iter(self._requests))]

    def keep_of(
        self, handle: Handle, aborted: AbortedRequest | None, why: JaxpageError | None = None
    ) -> None:
        """Keeps the request of a handle that has ended, if it may be continued.

        Args:
            handle: The handle.
            aborted: What the request had; None if the engine does not have it.
            why: The error with which it ended, if it did.
        """
        if not handle.is_kept or isinstance(why, EngineFailed | ShuttingDown):
            return
        if aborted is not None:
            request = handle.request._replace(aborted=aborted)
            self.keep(handle.name or handle.request_id, request)
        elif handle.continues and handle.reporter is None:
            self.keep(handle.name, handle.request)  # it ends before the engine has it again

    def give(self, handles: Iterable[Handle], live: Container[str]) -> None:
        """Gives handles the requests that they continue, all or none, with the ids of these.

        Args:
            handles: The handles; those of new requests stay as they are.
            live: The ids of requests whose last output was not read.

        Raises:
            RequestGone: A request is not here, or its last output was not read.
        """
        taken: list[Handle] = []
        try:
            for handle in handles:
                if not handle.continues:
                    continue
                handle.request = self.take(handle.name)
                taken.append(handle)
                assert handle.request.aborted and handle.request.aborted.request
                handle.request_id = handle.request.aborted.request.request_id
                # Its caller has not seen the end, and would miss the text between.
                if handle.request_id in live:
                    raise RequestGone(
                        "a request cannot be continued before its last output was read"
                    )
        except JaxpageError:
            for handle in taken:
                self.keep(handle.name, handle.request)
            raise

    def find(self, name: Hashable) -> PreparedRequest:
        """Returns a request, which stays here.

        Raises:
            RequestGone: There is no such request.
            UnsupportedError: It is a beam search.
        """
        request = self._requests.get(name)
        if request is None:
            raise self._write_gone(name)
        if beam := request.checked.beam:
            raise UnsupportedError(
                f"a beam search (beam_width={beam.beam_width}) cannot be continued"
            )
        return request

    def take(self, name: Hashable) -> PreparedRequest:
        """Returns a request, which goes on and is not kept any more; see `find` for the errors."""
        request = self.find(name)
        del self._requests[name]
        return request

    def _write_gone(self, name: Hashable) -> RequestGone:
        shown = name[-1] if isinstance(name, tuple) else name
        why = (
            f"the last {self._maximum} that were aborted are kept, and it is not among them"
            if self._maximum
            else "none is kept"
        )
        return RequestGone(
            f"request {shown!r:.80} cannot be continued: {why} (max_aborted_requests is "
            f"{self._maximum})"
        )
