"""Defines the objects that `LLM` gives its callers: a stream of outputs, and a pinned prefix."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Self

from jaxpage.driver.driver import Driver
from jaxpage.driver.handle import Handle, Update
from jaxpage.engine import PreparedRequest
from jaxpage.errors import JaxpageError
from jaxpage.outputs import RequestOutput


class RequestStream(Iterator[RequestOutput]):
    """Yields the chunks of one request, one for each step that changed it.

    Closing the stream, or losing the last reference to it, ends the request.
    """

    def __init__(self, driver: Driver, request: PreparedRequest):
        """Gives the request to the engine; raises the same errors as `Driver.add`."""
        self._driver = driver
        self._box: queue.SimpleQueue[list[Update]] = queue.SimpleQueue()
        self._updates: Iterator[Update] = iter(())
        self._handle: Handle | None = Handle(request, self._box.put, is_stream=True)
        try:
            driver.wait(driver.add([self._handle]))
        except BaseException:
            self.close()
            raise

    def __next__(self) -> RequestOutput:
        """Returns the next chunk; waits until it is there."""
        if self._handle is None:
            raise StopIteration
        chunk: RequestOutput | None = None
        try:
            self._driver.check_open()
            update = next(self._updates, None)
            if update is None:
                updates: list[Update] = self._driver.wait_for_item(self._box)
                self._updates = iter(updates)
                update = next(self._updates)
            if isinstance(update[1], JaxpageError):
                raise update[1]
            chunk = update[1]
        finally:
            if chunk is None or chunk.finished:
                self.close()
        return chunk

    def close(self) -> None:
        """Ends the request if it has not finished; its blocks are free before the next step."""
        handle = self._handle
        self._handle = None
        if handle is not None:
            self._driver.end([handle])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self.__dict__.get("_handle") is not None:
            self.close()


class HeldPrefix:
    """Keeps a prefix's keys and values in place until it is released.

    Unlike a stream, the pin does not end when the object is dropped: prompts find it by their
    tokens. It ends with its engine, too.

    Attributes:
        num_tokens: The number of tokens of the prefix.
    """

    def __init__(self, driver: Driver, pin_id: int, num_tokens: int):
        self.num_tokens = num_tokens
        self._driver = driver
        self._pin_id = pin_id

    @property
    def released(self) -> bool:
        """Returns whether the pin was released, or lost with the pages in a failed step."""
        return not self._driver.is_pinned(self._pin_id)


class PinnedPrefix(HeldPrefix):
    """Keeps a prefix in place until `release()` or the end of a `with` block; see `HeldPrefix`."""

    @classmethod
    def of(cls, driver: Driver, prefix: PreparedRequest) -> Self:
        """Computes a prefix and pins it; raises the same errors as `Driver.pinning`."""
        with driver.pinning(prefix) as pin_id:
            return cls(driver, driver.wait(pin_id), len(prefix.token_ids))

    def release(self) -> None:
        """Frees the blocks that no running request shares. A second call does nothing."""
        if not self.released:
            self._driver.wait(self._driver.unpin(self._pin_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
