"""Keeps Ctrl-C out of what must happen as a whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """Whether Ctrl-C has come while it was held back. Long work looks at `pending` from time to time and ends early."""

    def __init__(self) -> None:
        self.pending = False

    def note(self, number: int, frame: Any) -> None:
        """The signal handler meanwhile."""
        self.pending = True


@contextmanager
def held_interrupts() -> Iterator[Interrupts]:
    """Holds Ctrl-C back, however often it comes, until the block has cleaned up; then raises KeyboardInterrupt.

    Only Python's own handler is held back, a program's own is left alone; and only in the main thread, where signals arrive. A block
    inside another one sees the outer one's interrupts and leaves the raising to it.
    """
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    outer = getattr(handler, "__self__", None)
    if handler is not signal.default_int_handler:
        yield outer if isinstance(outer, Interrupts) else Interrupts()
        return
    interrupts = Interrupts()
    signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts.pending:
        raise KeyboardInterrupt
