"""Takes paths with slashes too many, which clients make when they join a base URL and a path."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxpage.serving.dialects.registry import DIALECTS

_SLASHES = re.compile("//+")
# The first folder of every path of a dialect; further paths of the server are in these, too.
_APIS = tuple({f"/{path.split('/')[1]}/" for dialect in DIALECTS for path in dialect.beginnings})


class PlainPaths:
    """The middleware by which all after it, and the routes, see each path in one form."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on with its path in the plain form."""
        if scope["type"] == "http" and (path := plain_path(scope["path"])) != scope["path"]:
            scope = {**scope, "path": path}
        await self._app(scope, receive, send)


def plain_path(path: str) -> str:
    """Returns the path of an API without doubled slashes, and without one at its end.

        /v1//models/  →  /v1/models

    Other paths, such as those of the page, stay as they are.
    """
    plain = _SLASHES.sub("/", path)
    return plain.rstrip("/") if plain.startswith(_APIS) else path
