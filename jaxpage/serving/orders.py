"""What others ask of the engine's thread, between two steps of the engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from jaxpage.engine.engine import Engine


class Order(NamedTuple):
    """A function of the engine. future: gets what it returns or raises; None: what it raises is fatal."""

    function: Callable[[Engine], Any]
    future: Future[Any] | None = None
    adds_requests: bool = False

    def obey(self, engine: Engine) -> None:
        if self.future is None:
            self.function(engine)
        elif self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.function(engine))
            except Exception as error:
                self.future.set_exception(error)

    def refuse(self, error: Exception) -> None:
        """It will not be obeyed any more."""
        if self.future is not None and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Replacement(NamedTuple):
    """Other weights, that wait for what runs with the old ones. version: of them, once they are in use."""

    weights: Any
    version: Future[int]

    def order(self) -> Order:
        return Order(lambda engine: engine.replace_weights(self.weights), self.version)
