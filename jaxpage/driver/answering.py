"""Follows requests whose results are answers and no outputs: pinned prefixes and vectors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxpage.device import Embedder
from jaxpage.driver.handle import Handle, Update
from jaxpage.driver.orders import Order, PendingAnswer
from jaxpage.driver.turns import Turns
from jaxpage.engine import Engine, PreparedRequest
from jaxpage.outputs import RequestOutput, TokenPooling


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
    """Follows prompts whose vectors are computed, one in each turn, all with the same weights.

    Attributes:
        vectors: The answers, each of which gets the vector [D] of a prompt.
    """

    needs_place = False

    def __init__(
        self,
        turns: Turns,
        embedder: Embedder,
        prompts: Sequence[PreparedRequest],
        poolings: Sequence[TokenPooling],
    ) -> None:
        self.vectors: list[PendingAnswer[npt.NDArray[np.float32]]] = [
            PendingAnswer() for _ in prompts
        ]
        super().__init__(turns, prompts[0], self.vectors)
        self._embedder = embedder
        self._remaining = iter(list(zip(prompts, poolings, self.vectors, strict=True)))
        self._weights: Any = None

    @property
    def reads_weights(self) -> bool:
        """Returns whether vectors are still computed; see `Handle.reads_weights`."""
        return self._weights is not None and not self.is_over

    def begin(self, engine: Engine) -> None:
        """Takes the weights of now for all vectors, and computes the first in the next turn."""
        self._weights = engine.parameters["target"]
        self._turns.post(Order(self._compute))

    def _compute(self, engine: Engine) -> None:
        """Computes a vector between two steps, and posts the order for the next one."""
        if self.is_over:
            return
        try:
            prompt, pooling, vector = next(self._remaining)
            vector.set_result(self._embedder.embed(self._weights, prompt.token_ids, pooling))
            if not self.vectors[-1].done():
                self._turns.post(Order(self._compute))
                return
        except Exception as error:
            self.fail(error)
        self._turns.end_one(self)
