"""Sends requests to the routes of a server from within its process.

The requests take the way of those of clients, through the same limits, readers and answers, but for
the connection, the keys and the guard against pages of other sites.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Message, Scope

from jaxpage.serving.http.envelope import Envelope
from jaxpage.serving.http.request_limits import Limits
from jaxpage.serving.metrics.metrics import ServerMetrics
from jaxpage.serving.settings.server_config import ServerConfig


class InProcessAnswer(NamedTuple):
    """Holds the answer to a request.

    Attributes:
        status: The HTTP status.
        request_id: The id of the request in the log.
        body: The body of the answer.
    """

    status: int
    request_id: str
    body: bytes


class InProcess:
    """Sends requests to routes."""

    def __init__(
        self, routes: Sequence[BaseRoute], config: ServerConfig, metrics: ServerMetrics
    ) -> None:
        limited: ASGIApp = Limits(
            Router(routes),
            max_body_bytes=config.max_body_bytes,
            body_timeout_seconds=config.body_timeout_seconds,
        )
        self._app = Envelope(limited, metrics)

    async def post(self, path: str, body: bytes, owner: str = "") -> InProcessAnswer:
        """Returns the answer to a request with a JSON body, which is no stream.

        Args:
            path: The path of the route.
            body: The body.
            owner: A digest of the API key for which the request is sent; see `ApiKeys`.
        """
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "state": {"owner": owner},
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Message] = []

        never = asyncio.Event()

        async def receive() -> Message:
            if messages:
                return messages.pop()
            # This client never leaves; a request that is no longer wanted is cancelled.
            await never.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        answer_headers = dict(sent[0]["headers"])
        return InProcessAnswer(
            sent[0]["status"],
            answer_headers[b"x-request-id"].decode(),
            b"".join(message.get("body", b"") for message in sent[1:]),
        )
