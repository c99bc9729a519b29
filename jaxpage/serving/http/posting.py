"""Routes that take a POST with JSON, and see when their client leaves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxpage.serving.http.host_guard import check_origin
from jaxpage.serving.http.limits import check_is_json, check_is_plain
from jaxpage.serving.wire.dialects import OLLAMA_PATHS


class _Post:
    """An ASGI application that is no function: Starlette hands it the request as it came."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


def post_route(path: str, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> Route:
    return Route(path, _Post(answer), methods=["POST"])


async def json_body(scope: Scope, receive: Receive) -> bytes:
    request = Request(scope, receive)
    check_is_plain(request.headers)
    if scope["path"].startswith(OLLAMA_PATHS):
        # Ollama takes JSON under any name, and its clients and the lines for curl in its
        # documentation rely on it. But a page of another site may send whatever has no name of its
        # own, so the browser has to say that it is none.
        check_origin(request.headers)
    else:
        check_is_json(request.headers)
    return await request.body()
