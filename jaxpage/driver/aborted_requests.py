"""Keeps the requests that were aborted last, so that their callers can continue them."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable

from jaxpage.driver.handle import Handle
from jaxpage.engine import PreparedRequest
from jaxpage.errors import (
    EngineFailed,
    JaxpageError,
    RequestGone,
    ShuttingDown,
    UnsupportedError,
)
from jaxpage.step.aborted import AbortedRequest


class AbortedRequests:
    """Holds aborted requests by the ids that their callers know.

    Only the thread that takes the turns uses it.
    """

    def __init__(self, maximum: int) -> None:
        """Keeps at most so many requests, those that were aborted last."""
        self._maximum = maximum
        self._requests: dict[Hashable, PreparedRequest] = {}

    def keep(self, name: Hashable, request: PreparedRequest) -> None:
        """Keeps a request, in place of an older one with the same id."""
        self._requests.pop(name, None)
        self._requests[name] = request
        while len(self._requests) > self._maximum:
            del self._requests[next(iter(self._requests))]

    def keep_of(
        self, handle: Handle, aborted: AbortedRequest | None, why: JaxpageError | None = None
    ) -> None:
        """Keeps the request of a handle that has ended, if it may be continued.

        Args:
            handle: The handle.
            aborted: What the request had; None if the engine does not have it.
            why: The error with which it ended, if it did.
        """
        if not handle.is_kept or isinstance(why, EngineFailed | ShuttingDown):
            return
        if aborted is not None:
            request = handle.request._replace(aborted=aborted)
            self.keep(handle.name or handle.request_id, request)
        elif handle.continues and handle.reporter is None:
            self.keep(handle.name, handle.request)  # it ends before the engine has it again

    def give(self, handles: Iterable[Handle], live: Container[str]) -> None:
        """Gives handles the requests that they continue, all or none, with the ids of these.

        Args:
            handles: The handles; those of new requests stay as they are.
            live: The ids of requests whose last output was not read.

        Raises:
            RequestGone: A request is not here, or its last output was not read.
        """
        taken: list[Handle] = []
        try:
            for handle in handles:
                if not handle.continues:
                    continue
                handle.request = self.take(handle.name)
                taken.append(handle)
                assert handle.request.aborted and handle.request.aborted.request
                handle.request_id = handle.request.aborted.request.request_id
                if handle.request_id in live:
                    raise RequestGone(
                        "a request cannot be continued before its last output was read"
                    )
        except JaxpageError:
            for handle in taken:
                self.keep(handle.name, handle.request)
            raise

    def find(self, name: Hashable) -> PreparedRequest:
        """Returns a request, which stays here.

        Raises:
            RequestGone: There is no such request.
            UnsupportedError: It is a beam search.
        """
        request = self._requests.get(name)
        if request is None:
            raise self._write_gone(name)
        if beam := request.checked.beam:
            raise UnsupportedError(
                f"a beam search (beam_width={beam.beam_width}) cannot be continued"
            )
        return request

    def take(self, name: Hashable) -> PreparedRequest:
        """Returns a request, which goes on and is not kept any more; see `find` for the errors."""
        request = self.find(name)
        del self._requests[name]
        return request

    def _write_gone(self, name: Hashable) -> RequestGone:
        shown = name[-1] if isinstance(name, tuple) else name
        why = (
            f"the last {self._maximum} that were aborted are kept, and it is not among them"
            if self._maximum
            else "none is kept"
        )
        return RequestGone(
            f"request {shown!r:.80} cannot be continued: {why} (max_aborted_requests is "
            f"{self._maximum})"
        )
