"""Limits the headers of a request, and the type, size and duration of its body."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import re
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxpage.serving.http.parser import MAX_HEADER_BYTES
from jaxpage.serving.wire.errors import RETRY_AFTER, ApiError

MAX_HEADERS = 100
# The bytes of bodies from which on freed memory is given back. A body of JSON takes dozens of times
# its bytes while it is read.
_WORTH_GIVING_BACK = 1 << 20
# The names of UTF-8 (IANA's and the browsers'), in small letters and without marks between.
_UTF8 = ("utf8", "u8", "csutf8", "unicode11utf8", "unicode20utf8", "xunicode20utf8")
# The number of bodies of the largest size that may be held at a time, or as many bytes in smaller
# ones.
NUM_LARGEST_BODIES = 32


def give_memory_back() -> None:
    """Asks glibc to give the pages of freed memory back to the system.

    By itself it keeps hundreds of megabytes after many bodies at once.
    """
    with contextlib.suppress(AttributeError, OSError):  # other C libraries have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


class Limits:
    """Refuses requests that break a limit, before they are read in whole.

    If a body breaks a limit, the wrapped application gets an ApiError from `receive`. The bodies of
    all requests that are being answered share a budget, so that their memory does not grow with the
    number of connections.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        body_timeout_seconds: float,
        larger: Mapping[str, int] | None = None,
    ) -> None:
        """Makes the middleware.

        Args:
            app: The wrapped application.
            max_body_bytes: The largest body.
            body_timeout_seconds: The time for a body to arrive.
            larger: The largest bodies of the paths that take larger ones.
        """
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._larger = larger or {}
        self._timeout = body_timeout_seconds
        self._budget = NUM_LARGEST_BODIES * max_body_bytes
        self._num_held = 0  # the bytes of all bodies that are held now
        self._max_held = 0  # the most of them since memory was last given back

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and counts the bytes of its body."""
        headers = Headers(scope=scope)
        maximum = self._larger.get(scope["path"], self._max_body_bytes)
        self._check(headers, maximum)
        deadline = asyncio.get_running_loop().time() + self._timeout
        num_bytes = 0
        is_complete = False

        async def receive_limited() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:
                return await receive()  # only the disconnect can follow
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408, f"The request body did not arrive within {self._timeout:g} s"
                ) from None
            size = len(message.get("body", b""))
            if num_bytes + size > maximum:
                raise _too_large(maximum)
            if self._num_held + size > self._budget:
                raise ApiError(
                    503,
                    "Too many request bodies are being read; try again later",
                    headers=RETRY_AFTER,
                )
            num_bytes += size
            self._num_held += size
            self._max_held = max(self._max_held, self._num_held)
            is_complete = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, receive_limited, send)
        finally:
            self._num_held -= num_bytes
            # malloc_trim looks through all freed memory, so it runs once when many bodies have
            # gone.
            if self._max_held > _WORTH_GIVING_BACK and self._num_held < _WORTH_GIVING_BACK // 4:
                self._max_held = 0
                asyncio.get_running_loop().run_in_executor(None, give_memory_back)

    def _check(self, headers: Headers, maximum: int) -> None:
        if len(headers) > MAX_HEADERS:
            raise ApiError(
                431, f"The request has {len(headers)} headers; at most {MAX_HEADERS} are read"
            )
        num_bytes = sum(len(name) + len(value) for name, value in headers.raw)
        # The parser has its own limit, but does not measure headers that arrive in one piece.
        if num_bytes > MAX_HEADER_BYTES:
            raise ApiError(
                431, f"The headers have {num_bytes} bytes; at most {MAX_HEADER_BYTES} are read"
            )
        # The parser has checked that it is a number.
        if int(headers.get("content-length", "0")) > maximum:
            raise _too_large(maximum)


def _too_large(maximum: int) -> ApiError:
    return ApiError(413, f"The request body is larger than the {maximum} bytes that are read")


def check_is_plain(headers: Headers) -> None:
    """Raises ApiError if the headers say that the body is compressed or encoded otherwise."""
    if (encoding := headers.get("content-encoding", "identity").strip().lower()) not in (
        "identity",
        "",
    ):
        raise ApiError(
            415, f"Content-Encoding {encoding[:40]!r} is not supported; send the body as it is"
        )


def check_is_json(headers: Headers) -> None:
    """Raises ApiError unless the headers say that the body is JSON in UTF-8, however they spell it.

    A media type has parameters after it: `application/json; charset="utf8"`.
    """
    media_type, *parameters = headers.get("content-type", "").lower().split(";")
    named = (parameter.partition("=") for parameter in parameters)
    charsets = [value for name, _, value in named if name.strip() == "charset"]
    if media_type.strip() != "application/json" or not all(map(_is_utf8, charsets)):
        raise ApiError(415, "Unsupported Media Type: only 'application/json' in UTF-8 is read")


def _is_utf8(charset: str) -> bool:
    return re.sub(r"[^a-z0-9]", "", charset) in _UTF8
