"""Keeps what was made of the pictures that were used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LastUsed(Generic[Value]):
    """Keeps the values that were used last, up to a number of bytes. Any thread may call it.

    Attributes:
        num_bytes: The bytes of the values that are kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        # The last used comes last. The number is its size in bytes.
        self._values: OrderedDict[bytes, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Value | None:
        """Returns the value of a key, or None if it is not kept."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def add(self, key: bytes, value: Value, num_bytes: int) -> None:
        """Keeps a value, and gives up those that were not used for the longest time."""
        with self._lock:
            if key not in self._values:
                self._values[key] = value, num_bytes
                self.num_bytes += num_bytes
            while self.num_bytes > self._max_bytes:
                _, (_, size) = self._values.popitem(last=False)
                self.num_bytes -= size

    def clear(self) -> None:
        """Gives up all values."""
        with self._lock:
            self._values.clear()
            self.num_bytes = 0
