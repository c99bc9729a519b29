"""Connections that cannot be held open: uvicorn's HTTP/1.1 protocol with deadlines for what comes in and for what is not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxpage.serving.http.answers import encoded, send_error
from jaxpage.serving.wire.errors import RETRY_AFTER, ApiError

MAX_HEADER_BYTES = 1 << 16
MAX_BYTES_BEHIND = 1 << 16  # a request that is being answered: of the next ones, which wait


class _Timer:
    """Calls something later, unless it is stopped or started again before."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        return self._handle is not None

    def start(self, seconds: float, function: Callable[[], None]) -> None:
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(seconds, function)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(H11Protocol):
    """One connection of a client. When it is cut, who answers sees a disconnect."""

    def __init__(
        self,
        *args: Any,
        silent_seconds: float,
        receive_seconds: float,
        send_seconds: float,
        max_connections: int,
        no_room: ASGIApp,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            silent_seconds: from the connection's beginning to its first byte.
            receive_seconds: from the first byte of a request to its end.
            send_seconds: that nothing of an answer is read.
            max_connections: those beyond them are answered by `no_room`; from twice as many on they are cut at once.
        """
        super().__init__(*args, **kwargs)
        self._receive_seconds = receive_seconds
        self._send_seconds = send_seconds
        self._max_connections = max_connections
        self._no_room = no_room
        self._silent_seconds = silent_seconds
        self._is_silent = True
        self._receiving = _Timer()
        self._sending = _Timer()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > 2 * self._max_connections:
            transport.abort()
            return
        if len(self.connections) > self._max_connections:
            self.app = self._no_room
        transport.set_write_buffer_limits(high=0)  # so that we hear of every byte that is not read
        self._receiving.start(self._silent_seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._receiving.stop()
        self._sending.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_silent:
            self._is_silent = False
            self._receiving.stop()
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._expect_request()
        else:
            self._receiving.stop()

    def handle_events(self) -> None:
        """uvicorn reads no further behind a request that is being answered, and then it sees nobody leave."""
        super().handle_events()
        if self.conn.their_state is h11.DONE and not self.transport.is_closing():
            if len(self.conn.trailing_data[0]) > MAX_BYTES_BEHIND:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:  # uvicorn closes it if nothing follows
            self._receiving.stop()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._sending.stop()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP is answered once, unless an answer is under way."""
        body = encoded(ApiError(400, msg).body())
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        events: list[Any] = [h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()]
        with contextlib.suppress(h11.LocalProtocolError):
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _expect_request(self) -> None:
        if not self._receiving.runs:
            self._receiving.start(self._receive_seconds, self.transport.abort)

    def _watch_reader(self, num_unread: int) -> None:
        self._sending.start(self._send_seconds, lambda: self._cut_if_not_read(num_unread))

    def _cut_if_not_read(self, num_unread: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < num_unread:
            self._watch_reader(left)  # slow, but it reads
        else:
            if self.scope is not None:
                self.scope["state"]["cut_because"] = "slow_reader"
            self.transport.abort()


async def no_room(scope: Scope, receive: Receive, send: Send) -> None:
    """The answer to a connection that is one too many."""
    headers = {**RETRY_AFTER, "connection": "close"}
    error = ApiError(503, "There are too many connections", code="too_many_connections", headers=headers)
    await send_error(error, scope, receive, send)
