"""Sends the stream of an answer, which is never silent for long.

The headers of a stream wait until the engine has the request, so that a refusal has a status. They
do not wait for longer than a stream may be silent: from then on a refusal ends the stream.

    body ─── read ─── model loaded ─── submitted ─── tokens ─── end
      └─ 5 s ─▶ headers, comment ─ 5 s ─▶ comment ─ 5 s ─▶ comment
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import Message, Scope, Send

from jaxpage.serving.dialects.registry import dialect_of
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import Exchange

# By default nginx, as a proxy, would hold back parts of a stream until they fill its buffer.
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
# So often the clock looks whether a request that is not read yet asks for a stream.
_CHECK_SECONDS = 1.0


class AnswerStream:
    """The stream of an answer, on the event loop of its request.

    Attributes:
        is_requested: True once the request is known to ask for a stream. The thread that reads the
            request sets it.
        is_open: True from the headers to the end.
        dialect: The API of the request.
        exchange: The request and its answer, once the request is read.
        frame: Encodes the parts of the stream.
    """

    def __init__(self, scope: Scope, send: Send, seconds: float) -> None:
        """Makes a stream that has not begun, and whose clock stands still.

        Args:
            scope: The request, as ASGI describes it.
            send: Takes the messages of the answer.
            seconds: The longest silence in seconds; 0 for any.
        """
        self.is_requested = False
        self.is_open = False
        self.dialect = dialect_of(scope["path"])
        self.exchange: Exchange | None = None
        self.frame = self.dialect.stream.new_frame()
        self._scope = scope
        self._send = send
        self._seconds = seconds
        self._last_sent = 0.0
        self._num_sending = 0
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    def start_clock(self) -> None:
        """Starts to count the silence, unless it is counted already; the body was received."""
        if self._seconds and self._timer is None:
            self._last_sent = asyncio.get_running_loop().time()
            self._wait(self._seconds)

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Sends the headers, unless the clock has sent them already.

        Args:
            headers: The headers in addition to those of every stream.
        """
        if self._comment is not None:
            await asyncio.gather(self._comment, return_exceptions=True)
        if not self.is_open:
            await self._send_headers(headers)

    async def send(self, body: bytes) -> None:
        """Sends bytes of the stream; none are no silence that was broken."""
        if body:
            await self._send_message(
                {"type": "http.response.body", "body": body, "more_body": True}
            )

    async def end(self, body: bytes) -> None:
        """Sends the last bytes."""
        await self.stop_clock()
        self.is_open = False
        body += self.dialect.stream.end
        await self._send_message({"type": "http.response.body", "body": body})

    async def fail(self, error: ApiError) -> None:
        """Ends the stream with an error, in the shape of the API."""
        chunks = self.dialect.failure_chunks(error, self.exchange)
        await self.end(b"".join(map(self.frame, chunks)))

    async def stop_clock(self) -> None:
        """Sends no more comments, and waits for the end of one that is being sent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            # It waits for the client to read, or has been sent.
            self._comment.cancel()
            await asyncio.gather(self._comment, return_exceptions=True)
            self._comment = None

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check)

    def _check(self) -> None:
        """Sends a comment if there was silence for long enough, and plans the next look."""
        left = self._last_sent + self._seconds - asyncio.get_running_loop().time()
        is_sending = bool(self._num_sending) or not (self._comment is None or self._comment.done())
        if left > 0:
            self._wait(left)
        elif is_sending or not self.is_requested:
            self._wait(min(_CHECK_SECONDS, self._seconds))
        else:
            self._comment = asyncio.ensure_future(self._send_comment())
            self._wait(self._seconds)

    async def _send_comment(self) -> None:
        if not self.is_open:
            await self._send_headers({})
        await self.send(self.dialect.stream.comment)

    async def _send_headers(self, headers: Mapping[str, str]) -> None:
        headers = {"content-type": self.dialect.stream.media_type, **_HEADERS, **headers}
        raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send_message(
            {"type": "http.response.start", "status": 200, "headers": raw_headers}
        )
        self.is_open = True
        # The connection sends this comment to find out whether the client is still there.
        self._scope["state"]["comment"] = self.dialect.stream.comment

    async def _send_message(self, message: Message) -> None:
        self._num_sending += 1
        try:
            await self._send(message)
        finally:
            self._num_sending -= 1
        self._last_sent = asyncio.get_running_loop().time()


def stream_of(scope: Scope) -> AnswerStream:
    """Returns the stream of a request, which `Envelope` has made."""
    stream: AnswerStream = scope["state"]["stream"]
    return stream
