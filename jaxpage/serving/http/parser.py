"""Parses requests with h11, and adds the checks that h11 leaves to its user.

These concern empty lines before a request, the length of its body, and the form of its target.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import h11

MAX_HEADER_BYTES = 1 << 16
_EMPTY_LINES = re.compile(rb"(?:\r?\n)*")
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE)


class HTTPParser(h11.Connection):
    """The server's side of a connection.

    Empty lines before a request are skipped (RFC 9112, 2.2). A target in absolute form is replaced
    by its path, and the Host by the host that it names (3.2.2). A request that gives the length of
    its body in two ways is refused (6.1): a proxy may take the other one, which is how requests are
    smuggled past it.

    Attributes:
        problem: The reason for which a request was refused that h11 itself would take; else None.
        is_chunked: True if the body of the last request comes in chunks, and not with its length.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self.problem: str | None = None
        self.is_chunked = False

    def next_event(self) -> Any:
        """Returns the next event, which is checked if it is a request."""
        if self.their_state is h11.IDLE and not self._skip_empty_lines():
            return h11.NEED_DATA
        event = super().next_event()
        return self._check(event) if isinstance(event, h11.Request) else event

    def _skip_empty_lines(self) -> bool:
        """Removes empty lines, and returns False if the rest may be the first half of one."""
        waiting, _ = self.trailing_data
        match = _EMPTY_LINES.match(waiting)
        if match and match.end():
            self._receive_buffer.maybe_extract_at_most(match.end())
            waiting = waiting[match.end() :]
        return waiting != b"\r"

    def _check(self, request: h11.Request) -> h11.Request:
        names = {name for name, _ in request.headers}
        self.is_chunked = b"transfer-encoding" in names
        if {b"content-length", b"transfer-encoding"} <= names:
            self._refuse("Content-Length and Transfer-Encoding exclude each other")
        if request.http_version < b"1.1" and b"transfer-encoding" in names:
            self._refuse("HTTP/1.0 has no Transfer-Encoding")
        if not (absolute := _ABSOLUTE.fullmatch(request.target)):
            return request
        host, target = absolute.groups()
        if not host or b"@" in host:
            self._refuse("The target of a request must name a host, and no user")
        return h11.Request(
            method=request.method,
            target=target if target.startswith(b"/") else b"/" + target,
            headers=[
                (b"host", host),
                *((name, value) for name, value in request.headers if name != b"host"),
            ],
            http_version=request.http_version,
        )

    def _refuse(self, problem: str) -> NoReturn:
        self.problem = problem
        raise h11.RemoteProtocolError(problem)
