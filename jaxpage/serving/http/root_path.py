"""Takes the prefix off the paths of requests that come through a proxy."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class BelowRootPath:
    """Has an application answer paths with a prefix as those without it.

    Some proxies strip the prefix by which they know the server, others hand it on.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        """Wraps an application.

        Args:
            app: The application.
            prefix: The prefix, such as /llm.
        """
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        path = scope["path"].removeprefix(self._prefix)
        # The path /llmx begins with the prefix /llm, too, and is another one.
        if path != scope["path"] and path.startswith("/"):
            raw_path = scope["raw_path"].removeprefix(self._prefix.encode())
            scope = {**scope, "path": path, "raw_path": raw_path}
        await self._app(scope, receive, send)
