"""Keeps the requests that were aborted last, so that their callers can continue them."""

from __future__ import annotations

from collections.abc import Hashable

from jaxpage.engine import PreparedRequest
from jaxpage.errors import RequestGone, UnsupportedError


class AbortedRequests:
    """Holds aborted requests by the ids that their callers know.

    Only the thread that takes the turns uses it.
    """

    def __init__(self, most: int) -> None:
        """Keeps at most so many requests, those that were aborted last."""
        self._most = most
        self._requests: dict[Hashable, PreparedRequest] = {}

    def keep(self, name: Hashable, request: PreparedRequest) -> None:
        """Keeps a request, in place of an older one with the same id."""
        self._requests.pop(name, None)
        self._requests[name] = request
        while len(self._requests) > self._most:
            del self._requests[next(iter(self._requests))]

    def find(self, name: Hashable) -> PreparedRequest:
        """Returns a request, which stays here.

        Raises:
            RequestGone: There is no such request.
            UnsupportedError: It is a beam search.
        """
        request = self._requests.get(name)
        if request is None:
            raise self._gone(name)
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

    def _gone(self, name: Hashable) -> RequestGone:
        shown = name[-1] if isinstance(name, tuple) else name
        why = (
            f"the last {self._most} that were aborted are kept, and it is not among them"
            if self._most
            else "none is kept"
        )
        return RequestGone(
            f"request {shown!r:.80} cannot be continued: {why} (max_aborted_requests is "
            f"{self._most})"
        )
