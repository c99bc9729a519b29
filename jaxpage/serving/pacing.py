"""Slow motion: a time that each step takes at least, as long as a viewer of the page asks for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

_SECONDS_BETWEEN_LOOKS = 0.02  # whether somebody asks the engine something meanwhile


class Pace:
    """Asked for on the event loop by viewers, and looked at by the driver before each step."""

    def __init__(self) -> None:
        # by each viewer, in seconds; replaced as a whole: two threads see it
        self._asked: tuple[float, ...] = ()
        self._stepped = 0.0  # when the last step began

    @property
    def seconds(self) -> float:
        """From step to step at least; 0.0: as fast as it goes."""
        return max(self._asked, default=0.0)

    @contextlib.contextmanager
    def held(self, seconds: float) -> Iterator[None]:
        """Of several the slowest counts."""
        self._asked = (*self._asked, seconds)
        try:
            yield
        finally:
            rest = list(self._asked)
            rest.remove(seconds)
            self._asked = tuple(rest)

    def lets_step(self, has_orders: Callable[[], bool]) -> bool:
        """Waits until the next step is due. Returns False if it is not, but the driver has orders.

        Args:
            has_orders: Tells whether the driver has any.
        """
        while (left := self._stepped + self.seconds - time.monotonic()) > 0:
            if has_orders():
                return False
            time.sleep(min(left, _SECONDS_BETWEEN_LOOKS))
        self._stepped = time.monotonic()
        return True
