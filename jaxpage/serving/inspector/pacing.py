"""Slows the engine down as long as a viewer of the page asks for it.

In slow motion at least a given time passes from one step to the next.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

_POLL_SECONDS = 0.02  # the time between two looks at the driver's orders


class Pace:
    """Holds the least time of a step.

    Viewers ask for it on the event loop, and the driver's thread looks at it before each step.
    """

    def __init__(self) -> None:
        # The seconds that each viewer asks for. The tuple is replaced as a whole, because two
        # threads see it.
        self._requested: tuple[float, ...] = ()
        self._stepped = 0.0  # the time at which the last step began

    @property
    def seconds(self) -> float:
        """Returns the least time from one step to the next; 0.0 if nobody slows the engine down."""
        return max(self._requested, default=0.0)

    @contextlib.contextmanager
    def hold(self, seconds: float) -> Iterator[None]:
        """Asks for a least time while the context lasts; of several requests the longest counts."""
        self._requested = (*self._requested, seconds)
        try:
            yield
        finally:
            seconds_of_others = list(self._requested)
            seconds_of_others.remove(seconds)
            self._requested = tuple(seconds_of_others)

    def lets_step(self, has_commands: Callable[[], bool]) -> bool:
        """Waits until the next step is due. Returns False if it is not, but the driver has orders.

        Args:
            has_commands: Tells whether the driver has any.
        """
        while (left := self._stepped + self.seconds - time.monotonic()) > 0:
            if has_commands():
                return False
            time.sleep(min(left, _POLL_SECONDS))
        self._stepped = time.monotonic()
        return True
