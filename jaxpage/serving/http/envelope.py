"""Wraps the application in the middleware that answers errors; see `app`.

It gives every request an id and every answer its headers, answers every error, and counts refusals.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxpage.serving.dialects.registry import dialect_of
from jaxpage.serving.http.answer_stream import AnswerStream
from jaxpage.serving.http.answers import send_error, to_api_error
from jaxpage.serving.http.connection import LINGER_SECONDS
from jaxpage.serving.metrics.logs import log_refusal
from jaxpage.serving.metrics.metrics import ServerMetrics
from jaxpage.serving.metrics.tracing import record_of
from jaxpage.serving.wire.errors import ApiError

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_REASONS = {
    401: "unauthorized",
    403: "unauthorized",
    404: "not_found",
    408: "timeout",
    413: "too_large",
    429: "queue_full",
}


class Envelope:
    """The middleware that answers every error that comes before the first byte.

    An error that comes after the headers of a stream ends the stream.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, silent_seconds: float = 0) -> None:
        """Wraps an application.

        Args:
            app: The application.
            metrics: The counters of the server.
            silent_seconds: The longest silence of a stream in seconds; 0 for any.
        """
        self._app = app
        self._metrics = metrics
        self._silent_seconds = silent_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Has a request answered, and adds the headers and errors of the envelope."""
        if scope["type"] != "http":
            raise RuntimeError(f"this server speaks HTTP, not {scope['type']}")
        headers = Headers(scope=scope)
        header_id = headers.get("x-request-id", "")
        request_id = header_id if _REQUEST_ID.fullmatch(header_id) else uuid.uuid4().hex
        body_is_read = (
            "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"
        )
        has_begun = False
        scope.setdefault("state", {})["request_id"] = request_id

        async def watch_receive() -> Message:
            nonlocal body_is_read
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                body_is_read = True
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer["x-request-id"] = request_id
                if id_header := dialect_of(scope["path"]).habits.id_header:
                    answer[id_header] = request_id
                answer["x-content-type-options"] = "nosniff"
                # The rest of the input is not read, so no request can follow.
                if not body_is_read or scope["state"].get("is_last"):
                    answer["connection"] = "close"
                if (reason := _reason(message["status"], scope["state"])) is not None:
                    self._metrics.rejected(reason)
                    log_refusal(scope, message["status"], reason)
            elif not body_is_read and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await _read_on(watch_receive)
                message = {"type": "http.response.body"}
            await send(message)
            # Set after sending: if the start could not be sent, an error can still be answered.
            has_begun = True

        stream = AnswerStream(scope, send_with_headers, self._silent_seconds)
        scope["state"]["stream"] = stream
        try:
            await self._app(scope, watch_receive, send_with_headers)
        except ClientDisconnect as error:
            _forget_frames(error)
            self._metrics.aborted(scope["state"].get("cut_because", "disconnect"))
        except Exception as error:
            await stream.stop_clock()
            if has_begun and not stream.is_open:
                raise
            refusal = to_api_error(error)
            _forget_frames(error)
            if stream.is_open:
                self._note_refusal(refusal, scope)
                await stream.fail(refusal)
            else:
                await send_error(refusal, scope, receive, send_with_headers)
        finally:
            # Otherwise the request would stay until the garbage collector looks at this circle.
            stream.exchange = None
            await stream.stop_clock()

    def _note_refusal(self, refusal: ApiError, scope: Scope) -> None:
        """Counts and logs a refusal that no status tells of: the headers of the stream are out."""
        scope["state"].update(refused_because=refusal.code, refused_param=refusal.param)
        reason = _reason(refusal.status, scope["state"])
        if reason is not None:
            self._metrics.rejected(reason)
            log_refusal(scope, refusal.status, reason)
        record_of(scope).failed(reason or "error")


def _forget_frames(error: BaseException) -> None:
    """Removes the tracebacks of an error and of its causes, so that their frames are freed.

    One of the frames holds the task that holds the error, and another the request. Only the garbage
    collector would end this circle, and it seldom looks at everything: 32 refused bodies of 2.7 MB
    kept 1 GB.
    """
    errors: list[BaseException | None] = [error]
    while errors:
        if (current := errors.pop()) is not None and current.__traceback__ is not None:
            current.__traceback__ = None
            errors += [current.__cause__, current.__context__]


async def _read_on(receive: Receive) -> None:
    """Receives the rest of a body whose answer is out, for at most `LINGER_SECONDS`.

    A connection that is closed before the client has sent everything is reset, and many clients
    read the answer only after they have sent everything.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (await receive()).get("more_body", False):
                pass


def _reason(status: int, state: Mapping[str, Any]) -> str | None:
    """Returns why a request was refused; None for an answer that is no refusal.

    A request that the engine had and that failed is not refused.
    """
    if status == 503:  # this status has many reasons; `send_error` notes the one that holds
        return state.get("refused_because") or "busy"
    return _REASONS.get(status, "invalid" if 400 <= status < 500 else None)
