"""Times what a server streams: OpenAI's completions over HTTP/1.1, one connection per request."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

from jaxpage.errors import UsageError

READ_BYTES = 1 << 16
CONNECT_SECONDS = 10.0


@dataclass
class TimedAnswer:
    """Holds the answer to a request, with the times of its parts.

    All times are seconds of `time.perf_counter`.

    Attributes:
        due: The time at which the request was to be sent; a client's delay counts as latency.
        sent: The time at which it was sent.
        outputs: The times at which the streamed outputs came.
        ended: The time at which the stream ended.
        num_prompt_tokens: The prompt tokens by the server's count.
        num_output_tokens: The output tokens by the server's count.
        token_ids: The ids of the output, if the server gives them.
        error: The text of an error, or None.
    """

    due: float
    sent: float = 0.0
    outputs: list[float] = field(default_factory=list)
    ended: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    error: str | None = None


class Client:
    """Sends requests to one server.

    The key is $JAXPAGE_API_KEY or $OPENAI_API_KEY, if there is one.
    """

    def __init__(self, base_url: str) -> None:
        """Begins without a connection.

        Raises:
            UsageError: The text is no URL.
        """
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise UsageError(
                f"--base-url must be a URL such as http://127.0.0.1:8000, got {base_url!r}"
            )
        self._host = url.hostname
        self._is_secure = url.scheme == "https"
        self._port = url.port or (443 if self._is_secure else 80)
        # Users also give the address as clients of OpenAI take it, and the paths here have /v1.
        self._path = url.path.rstrip("/").removesuffix("/v1")
        # The variable is also the server's, and may hold several keys, separated by commas.
        key = os.environ.get("JAXPAGE_API_KEY", "").partition(",")[0] or os.environ.get(
            "OPENAI_API_KEY", ""
        )
        self._headers = [
            ("host", url.netloc),
            ("connection", "close"),
            ("content-type", "application/json"),
        ]
        self._headers += [("authorization", f"Bearer {key}")] if key else []

    async def get(self, path: str) -> dict[str, Any]:
        """Returns a JSON answer.

        Raises:
            UsageError: The server cannot be reached or has no such path.
        """
        try:
            answer: dict[str, Any] = json.loads(await self._read(path))
        except (OSError, TimeoutError, ValueError, h11.ProtocolError) as error:
            raise UsageError(
                f"{path} of the server cannot be had: {error or type(error).__name__}"
            ) from None
        return answer

    async def text(self, path: str) -> str | None:
        """Returns the text at a path, or None if it cannot be had."""
        try:
            return (await self._read(path)).decode()
        except (OSError, TimeoutError, ValueError, h11.ProtocolError):
            return None

    async def _read(self, path: str) -> bytes:
        return b"".join([part async for part in self._exchange("GET", path, b"")])

    async def complete(self, body: dict[str, Any], due: float) -> TimedAnswer:
        """Streams one completion; an error is a field of the answer."""
        answer = TimedAnswer(due, time.perf_counter())
        requested = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with aclosing(
                _events(self._exchange("POST", "/v1/completions", json.dumps(requested).encode()))
            ) as events:
                async for event in events:
                    now = time.perf_counter()
                    if error := event.get("error"):
                        raise ValueError(error.get("message"))
                    for choice in event.get("choices") or ():
                        token_ids = choice.get("token_ids") or []
                        # Some servers end with an event that has only the reason of the end.
                        if token_ids or choice.get("text"):
                            answer.outputs.append(now)
                            answer.token_ids += token_ids
                    if usage := event.get("usage"):
                        answer.num_prompt_tokens = usage["prompt_tokens"]
                        answer.num_output_tokens = usage["completion_tokens"]
            if not answer.outputs or not answer.num_output_tokens:
                raise ValueError("the stream ended without an output or without usage")
        except (OSError, TimeoutError, ValueError, h11.ProtocolError) as error:
            answer.error = str(error) or type(error).__name__
        answer.ended = time.perf_counter()
        return answer

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        """Yields the parts of the answer's body as they come.

        Raises:
            ValueError: The status is not 200.
        """
        connecting = asyncio.open_connection(self._host, self._port, ssl=self._is_secure or None)
        reader, writer = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        try:
            connection = h11.Connection(h11.CLIENT)
            headers = [*self._headers, ("content-length", str(len(body)))]
            request = h11.Request(method=method, target=self._path + path, headers=headers)
            for part in (request, h11.Data(body), h11.EndOfMessage()):
                writer.write(connection.send(part) or b"")
            status = 0
            event: Any
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    # Empty bytes tell h11 that the server has closed the connection.
                    connection.receive_data(await reader.read(READ_BYTES))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data) and status == 200:
                    yield bytes(event.data)
                elif isinstance(event, h11.ConnectionClosed):
                    raise ValueError("the server closed the connection")
            if status != 200:
                raise ValueError(f"status {status}")
        finally:
            writer.close()


async def _events(parts: AsyncIterator[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the JSON objects of server-sent events, up to [DONE]."""
    buffer = b""
    async for part in parts:
        # A part of the body may end in the middle of a line.
        *lines, buffer = (buffer + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data: ")
            if data != line and data.strip() != b"[DONE]":
                yield json.loads(data)
