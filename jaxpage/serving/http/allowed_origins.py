"""Lets pages of other origins use the server, if the setting `allowed_origins` names them.

Starlette's CORSMiddleware answers what browsers ask before a request (preflight), and adds the
headers without which they keep the answer from the page.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

# The headers in which a browser says for which page it sends a request.
_OF_THE_PAGE = {b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"}
_ANSWER_HEADERS = (
    "x-request-id",
    "x-jaxpage-ignored-fields",
    "x-jaxpage-adapter-digest",
    "retry-after",
)


class _AllowedPages:
    """Passes the requests of allowed pages on as if a program had sent them.

    The guards against pages of other sites look at the headers that are taken out here.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] == "http":
            origins = Headers(scope=scope).getlist("origin")
            if len(origins) == 1 and origins[0] in self._origins:
                headers = [pair for pair in scope["headers"] if pair[0] not in _OF_THE_PAGE]
                scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


def for_pages_of(origins: Sequence[str]) -> list[Middleware]:
    """Returns the middlewares for pages of these origins; none without an origin.

    They come before those that refuse, so that a page can also read a refusal, and so that a
    preflight, which has no key, is answered.
    """
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_ANSWER_HEADERS,
        ),
        Middleware(_AllowedPages, origins=origins),
    ]
