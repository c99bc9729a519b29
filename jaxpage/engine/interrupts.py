"""Keeps Ctrl-C, and the signal handlers of a program, out of what must happen as a whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

# Those whose handlers are known to raise exceptions. Profilers want theirs (SIGPROF, SIGVTALRM) where they come.
_NAMES = ("SIGALRM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class Interrupts:
    """Signals that have come while they were held back. Long work calls `run_handlers` from time to time, where an exception may come.

    pending: Ctrl-C is among them. Long work looks at it as well, and ends early.
    """

    def __init__(self) -> None:
        self.pending = False
        self._held: dict[int, Handler] = {}  # by the number of their signal
        self._noted: list[tuple[Handler, int, FrameType | None]] = []

    def hold(self) -> None:
        """Holds back the signals that have a handler in Python."""
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._held[number] = handler
                signal.signal(number, self._note)

    def release(self) -> None:
        for number, handler in self._held.items():
            if signal.getsignal(number) == self._note:  # and no handler has put another one in place
                signal.signal(number, handler)

    def run_handlers(self) -> None:
        """Runs the program's own handlers of the signals that have come. Raises what they raise."""
        while self._noted:
            handler, number, frame = self._noted.pop(0)
            handler(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler meanwhile."""
        handler = self._held[number]
        if handler is signal.default_int_handler:
            self.pending = True
        else:
            self._noted.append((handler, number, frame))


_interrupts: Interrupts | None = None  # of the outermost block of the main thread


@contextmanager
def held_interrupts() -> Iterator[Interrupts]:
    """Holds signals back, however often they come, until the block has cleaned up; then Ctrl-C raises KeyboardInterrupt.

    A signal whose handler is not in Python ends the process as ever. Signals arrive in the main thread: in others nothing is held. A
    block inside another one sees the outer one's signals and leaves them to it.
    """
    global _interrupts
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or _interrupts is not None:
        yield _interrupts if is_main and _interrupts else Interrupts()
        return
    interrupts = Interrupts()
    try:
        _interrupts = interrupts
        interrupts.hold()
        yield interrupts
    finally:
        interrupts.release()
        _interrupts = None
        interrupts.run_handlers()
    if interrupts.pending:
        raise KeyboardInterrupt
