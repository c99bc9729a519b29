"""Makes answers in JSON, and errors in the shape of the API that was called."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxpage.errors import (
    DeadlineExceeded,
    EngineFailed,
    NativeError,
    QueueFull,
    RequestGone,
    ShuttingDown,
    WeightsReplaced,
)
from jaxpage.serving.dialects.registry import dialect_of
from jaxpage.serving.wire.encoding import encode, encode_parts
from jaxpage.serving.wire.errors import INTERNAL, RETRY_AFTER, ApiError

logger = logging.getLogger(__name__)


def json_answer(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns an answer in JSON."""
    return Response(encode(value), status, headers, "application/json")


def whole_answer(value: Any, headers: Mapping[str, str] | None = None) -> ASGIApp:
    """Returns an answer in JSON that may be large; it belongs on a worker thread.

    A large one is encoded and sent in parts, so that it holds up neither the threads nor the event
    loop.
    """
    parts = encode_parts(value)
    if len(parts) == 1:
        return Response(parts[0], 200, headers, "application/json")
    return _InParts(parts, headers or {})


class _InParts:
    """An answer whose parts are sent as fast as the client reads them."""

    def __init__(self, parts: Sequence[bytes], headers: Mapping[str, str]) -> None:
        self._parts = parts
        size = sum(map(len, parts))
        headers = {"content-length": str(size), "content-type": "application/json", **headers}
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)  # the send may not have waited
        await send({"type": "http.response.body", "body": b""})


def make_ignored_header(fields: Sequence[str]) -> dict[str, str]:
    """Returns the header that names the ignored fields of a request, if there are any."""
    return {"x-jaxpage-ignored-fields": ", ".join(fields)} if fields else {}


def error_answer(error: ApiError, path: str) -> Response:
    """Returns an error as an answer, in the shape of the API of this path."""
    return json_answer(dialect_of(path).error(error), error.status, error.headers)


def refusal_of(error: Exception) -> ApiError | None:
    """Returns the error for the client, if it may see this exception; otherwise None.

    It may see an ApiError, a panic of native code (without its text), and the errors of the driver.
    """
    match error:
        case ApiError():
            return error
        case NativeError():
            return ApiError(400, "The model's tokenizer gives up on this text")
        case QueueFull():
            return ApiError(429, str(error), code="rate_limit_exceeded", headers=RETRY_AFTER)
        case ShuttingDown():
            return ApiError(503, str(error), code="shutting_down", headers=RETRY_AFTER)
        case WeightsReplaced():
            return ApiError(503, str(error), code="weights_replaced", headers=RETRY_AFTER)
        case RequestGone():
            return ApiError(404, str(error), param="continue_from", code="request_not_found")
        case DeadlineExceeded():
            return ApiError(504, str(error))
        case EngineFailed():
            return ApiError(500, str(error))
    return None


def to_api_error(error: Exception) -> ApiError:
    """Returns the error for the client, for any exception.

    An exception that the client may not see is logged, and the client gets a fixed text.
    """
    refusal = refusal_of(error)
    if refusal is None:
        logger.error("a request could not be answered", exc_info=error)
    return refusal or ApiError(500, INTERNAL)


async def make_refusal(error: Exception, ask: Callable[[Exception], ApiError]) -> ApiError:
    """Returns the error for the client, for an exception while its request was prepared.

    Args:
        error: The exception.
        ask: Returns what the request says of an exception that `refusal_of` does not know, and of
            an ApiError, whose parameter may have another name in the client's API. It may look for
            a quote in all of the request, so it runs on another thread.
    """
    refusal = refusal_of(error)
    if refusal is None or refusal is error:
        refusal = await asyncio.to_thread(ask, error)
    # `to_api_error` logs an error that the client may not see.
    return to_api_error(error) if refusal.status == 500 else refusal


async def send_error(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends an error as an answer, and notes its code and parameter in the scope."""
    scope.setdefault("state", {}).update(refused_because=error.code, refused_param=error.param)
    await error_answer(error, scope["path"])(scope, receive, send)
