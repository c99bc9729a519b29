"""Computes a prefix and pins it between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpage.driver.handle import Handle, Update
from jaxpage.driver.orders import Answer
from jaxpage.driver.turns import Turns
from jaxpage.engine import Engine, PreparedRequest
from jaxpage.outputs import RequestOutput


class Pinning(Handle):
    """Follows a prefix that is computed, and pinned after the step that ends its computation.

    Attributes:
        pin_id: Gets the id of the pin.
    """

    def __init__(self, turns: Turns, prefix: PreparedRequest) -> None:
        super().__init__(prefix._replace(is_prefix=True), self._ended)
        self.pin_id: Answer[int] = Answer()
        self._turns = turns

    def begin(self, engine: Engine) -> object:
        """Gives the prefix to the engine; this is the function of an order."""
        try:
            self._turns.add([self], "prefix")
        except Exception:
            self._turns.end_one(self)
            raise
        return self._turns.begin_later(self.pin_id)

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
                self._turns.fail_later(self.pin_id, error)
            else:
                self._turns.answer(self.pin_id, pin_id)
            self._turns.end_one(self)
        return None

    def _ended(self, updates: Sequence[Update]) -> None:
        """Answers with an error if the request ended without a pin."""
        for _, update in updates:
            error: Exception
            if isinstance(update, RequestOutput):
                reason = update.outputs[0].stop_reason
                error = RuntimeError(f"the prefix could not be computed: {reason}")
            else:
                error = update
            self._turns.fail_later(self.pin_id, error)
