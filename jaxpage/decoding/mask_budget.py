"""Bounds the processor time that grammars take from the engine's thread in one step."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator

# A mask usually takes less than a millisecond. These limits are far above what ordinary grammars
# need, and short enough that the streams of other clients hardly notice.
REQUEST_SECONDS = 0.1
SEQUENCE_SECONDS = 0.004  # added for each sequence of the request
# The limit for all requests together. After it, a request may use only SEQUENCE_SECONDS for each of
# its sequences.
STEP_SECONDS = 1.0


class MaskBudget:
    """Counts the processor time of the calling thread for each request.

    It counts no wall-clock time, so that a busy machine ends nobody's request.
    """

    def __init__(
        self, step_seconds: float = STEP_SECONDS, request_seconds: float = REQUEST_SECONDS
    ) -> None:
        self._step_seconds = step_seconds
        self._request_seconds = request_seconds
        self._spent: Counter[str] = Counter()  # seconds in this step, by request id
        self._total = 0.0

    def begin_step(self) -> None:
        """Sets all counts back to zero."""
        self._spent.clear()
        self._total = 0.0

    @contextlib.contextmanager
    def spending(self, request_id: str) -> Iterator[None]:
        """Adds the processor time of its `with` block to the request's count."""
        begun = time.thread_time()
        try:
            yield
        finally:
            seconds = time.thread_time() - begun
            self._spent[request_id] += seconds  # type: ignore[assignment]  # a counter of floats
            self._total += seconds

    def is_spent(self, request_id: str, num_sequences: int) -> bool:
        """Returns whether the request has used all that it may use in this step."""
        allowed = SEQUENCE_SECONDS * num_sequences
        if self._total <= self._step_seconds:
            allowed += self._request_seconds
        return self._spent[request_id] > allowed


class Unlimited(MaskBudget):
    """Limits nothing, for a strategy without an engine."""

    def __init__(self) -> None:
        super().__init__(math.inf, math.inf)
