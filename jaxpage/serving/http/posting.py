"""Makes routes for POST requests, and reads their JSON.

The handlers get the ASGI messages as they come, so that they see when their client leaves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxpage.serving.dialects.registry import dialect_of
from jaxpage.serving.http.answer_stream import stream_of
from jaxpage.serving.http.host_guard import check_origin
from jaxpage.serving.http.request_limits import check_is_json, check_is_plain


class _Post:
    """An ASGI application around a function.

    Starlette would wrap a plain function, but hands the messages to an object as they come.
    """

    def __init__(self, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


def post_route(path: str, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> Route:
    """Returns a route for POST requests."""
    return Route(path, _Post(answer), methods=["POST"])


async def json_body(scope: Scope, receive: Receive) -> bytes:
    """Returns the body of a request, or raises ApiError if it may not be JSON."""
    request = Request(scope, receive)
    check_is_plain(request.headers)
    if dialect_of(scope["path"]).habits.takes_any_media_type:
        # A page of another site may send a body of a simple media type without asking, so the
        # origin is checked.
        check_origin(request.headers)
    else:
        check_is_json(request.headers)
    body = await request.body()
    stream_of(scope).start_clock()
    return body
