"""Counts the places of a driver's requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from jaxpage.driver.handle import Handle
from jaxpage.errors import CapacityError, QueueFull


class RequestPlaces:
    """Holds the free places.

    Any thread may take one, even in the middle of another call on the same thread, so there is no
    lock.
    """

    def __init__(self, number: int | None) -> None:
        """Makes so many places; None means any number."""
        self._number = number
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
