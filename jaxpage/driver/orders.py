"""Defines the orders to a driver, which obeys them between two steps, and the answers to them."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Generic, NamedTuple, TypeVar

from jaxpage.engine import Engine

_Result = TypeVar("_Result")

# A function returns this if the answer to its order comes later.
LATER: Final = object()


class PendingAnswer(Future[_Result]):
    """Holds the future answer to an order.

    An event loop awaits it with `asyncio.wrap_future`. A thread waits for its box and not for the
    future: a signal handler of the program may run at any moment of a wait, and must not run while
    this thread has the lock of a future that the driver's thread is about to fill.
    """

    def __init__(self) -> None:
        super().__init__()
        self.box = box = queue.SimpleQueue[None]()
        self.add_done_callback(lambda answer: box.put(None))


class Order(NamedTuple):
    """Holds a function of the engine, and the answer that gets what it returns or raises.

    Attributes:
        function: The function, which the driver calls between two steps.
        answer: Gets the result. If it is None, nobody waits, and an exception ends the driver.
        waits_for_weights: True if the order waits while other weights are on their way, or while
            the engine sleeps.
    """

    function: Callable[[Engine], Any]
    answer: PendingAnswer[Any] | None = None
    waits_for_weights: bool = False

    def obey(self, engine: Engine) -> None:
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
        """Answers with an error, since the order is never obeyed."""
        if self.answer is not None and self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)


class Change(Generic[_Result]):
    """Holds a change of the weights, such as other ones or sleep, which waits until nothing runs.

    Attributes:
        function: Makes the change.
        frees_weights: True if the weights are gone afterwards, so that the change also waits for
            requests that only read them.
        answer: Gets what the function returns or raises.
        is_withdrawn: True if nobody waits for the change any more.
    """

    def __init__(self, function: Callable[[Engine], _Result], *, frees_weights: bool) -> None:
        self.function = function
        self.frees_weights = frees_weights
        self.answer: PendingAnswer[_Result] = PendingAnswer()
        self.is_withdrawn = False

    def withdraw(self) -> None:
        """Takes the change back, unless it was made already."""
        self.is_withdrawn = True
