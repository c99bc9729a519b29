"""Adds deadlines to uvicorn's HTTP/1.1 connections, so that no client can hold one open for ever.

There are deadlines for the bytes of a request, and for an answer that the client does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxpage.serving.http.answers import send_error
from jaxpage.serving.http.parser import HTTPParser
from jaxpage.serving.wire.encoding import encode
from jaxpage.serving.wire.errors import RETRY_AFTER, ApiError

# The most bytes of further requests that wait while one is being answered.
MAX_PIPELINED_BYTES = 1 << 16
# The most bytes of a connection that are parsed in one turn of the event loop. A byte of a body can
# be a chunk of its own, which takes 14 microseconds. A body with a length takes no time.
MAX_BYTES_PER_TURN = 1 << 12
MAX_BODY_BYTES_PER_TURN = 1 << 18
MAX_BYTES_DROPPED = 1 << 24  # the most bytes that are received but not read
LINGER_SECONDS = 2.0  # the time for a client to send the rest after its answer is out
PROBE_SECONDS = 0.01  # the time from the client's end of input to the first probe
MAX_PROBE_SECONDS = 10.0  # the longest time between two probes; each is four times the one before


class _Timer:
    """Calls a function later, unless it is stopped or started again before."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        """Returns whether a function is going to be called."""
        return self._handle is not None

    def start(self, seconds: float, function: Callable[[], None]) -> None:
        """Calls the function after so many seconds, and forgets an earlier one."""
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(seconds, function)

    def stop(self) -> None:
        """Forgets the function."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(H11Protocol):
    """A client's connection; when it is cut, the application sees a disconnect.

    A client that has closed its sending side may have left, or may wait for its answer. Only a
    client that is gone resets the connection when something is written to it. So the server writes
    from time to time a probe that a waiting client ignores: the interim answer 100, or the comment
    of a stream (`state["comment"]` of its scope). HTTP/1.0 has no interim answers, so a client of
    HTTP/1.0 whose answer has not begun is taken for gone.

    Attributes:
        conn: The parser of the client's bytes.
    """

    conn: HTTPParser

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
        """Makes a connection.

        Args:
            *args: The arguments of uvicorn's protocol.
            silent_seconds: The longest time from the connection's beginning to its first byte.
            receive_seconds: The longest time from the first byte of a request to its end.
            send_seconds: The longest time in which the client reads nothing of an answer.
            max_connections: The most connections. A further one takes the place of an idle one; if
                none is idle, `no_room` answers it. Above twice as many they are cut at once.
            no_room: The application that answers a connection for which there is no place.
            **kwargs: The keyword arguments of uvicorn's protocol.
        """
        super().__init__(*args, **kwargs)
        self.conn = HTTPParser()
        self._receive_seconds = receive_seconds
        self._send_seconds = send_seconds
        self._max_connections = max_connections
        self._no_room = no_room
        self._silent_seconds = silent_seconds
        self._is_silent = True
        self._since = time.monotonic()
        self._address = ""
        self._has_ended = False  # True once the client has closed its sending side
        self._drops = False  # True once further bytes of the client are dropped
        self._num_dropped = 0
        self._probe_seconds = PROBE_SECONDS
        self._receiving = _Timer()
        self._sending = _Timer()
        self._probing = _Timer()
        self._lingering = _Timer()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admits the connection, puts it into the place of another, or refuses it."""
        super().connection_made(transport)
        self._read_at_most(MAX_BYTES_PER_TURN)
        self._address = str((self.client or ("",))[0])
        # The limit of open files has room for twice as many, so that others can be told why
        # (`descriptors`).
        if len(self.connections) > 2 * self._max_connections:
            transport.abort()
            return
        if len(self.connections) > self._max_connections and not self._takes_place_of_another():
            self.app = self._no_room
        transport.set_write_buffer_limits(high=0)  # `pause_writing` is called for any unread byte
        self._receiving.start(self._silent_seconds, self.transport.abort)

    @property
    def is_idle(self) -> bool:
        """Returns whether no request has begun to come since the beginning or the last answer."""
        has_begun = self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]
        return not has_begun and (self.cycle is None or self.cycle.response_complete)

    def _takes_place_of_another(self) -> bool:
        """Cuts an idle connection, and returns whether there was one.

        It takes the oldest idle connection of the client that has the most connections, so that
        no client keeps all places by holding connections that it does not use.
        """
        others = [
            connection
            for connection in self.connections
            if isinstance(connection, Connection) and connection is not self
        ]
        idle = [
            connection
            for connection in others
            if connection.is_idle and not connection.transport.is_closing()
        ]
        if not idle:
            return False
        num_held = Counter(connection._address for connection in others)
        max(
            idle, key=lambda connection: (num_held[connection._address], -connection._since)
        ).transport.abort()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers."""
        for timer in (self._receiving, self._sending, self._probing, self._lingering):
            timer.stop()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether there is still an answer to give; otherwise the connection is closed."""
        self._has_ended = True
        waits = (
            self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        )
        if waits:
            self._probe_seconds = PROBE_SECONDS
            self._probing.start(self._probe_seconds, self._probe)
        return waits

    def data_received(self, data: bytes) -> None:
        """Parses the bytes of a client, or drops them after its last request."""
        # In MUST_CLOSE the client has said itself that no request follows.
        if self._drops or self.conn.their_state is h11.MUST_CLOSE:
            self._num_dropped += len(data)
            if self._num_dropped > MAX_BYTES_DROPPED:
                self.transport.abort()
            return
        if self._is_silent:
            self._is_silent = False
            self._receiving.stop()
        super().data_received(data)
        has_length = self.conn.their_state is h11.SEND_BODY and not self.conn.is_chunked
        self._read_at_most(MAX_BODY_BYTES_PER_TURN if has_length else MAX_BYTES_PER_TURN)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._expect_request()
        else:
            self._receiving.stop()

    def handle_events(self) -> None:
        """Handles the parser's events, and goes on reading while a request is being answered.

        By itself uvicorn would stop reading, and so would not notice a client that disconnects.
        """
        super().handle_events()
        if self.conn.their_state is h11.DONE and not self.transport.is_closing():
            # The client gets the answer to this request, but none to those that wait.
            if len(self.conn.trailing_data[0]) > MAX_PIPELINED_BYTES:
                self._drops = True
                self.cycle.keep_alive = False
                self.cycle.scope["state"]["is_last"] = True
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Stops the deadline of the request, and closes the connection if no other can follow."""
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:  # uvicorn's own timeout closes an idle connection
            self._receiving.stop()
        if self._has_ended and not self.eof_received():
            self.transport.close()

    def pause_writing(self) -> None:
        """Starts the deadline for an answer that the client does not read."""
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stops the deadline, because the client has read everything."""
        super().resume_writing()
        self._sending.stop()

    def send_400_response(self, msg: str) -> None:
        """Answers input that is not HTTP with status 400, unless another answer is under way.

        The connection lingers, because many clients read the answer only when they have sent
        everything.
        """
        body = encode(ApiError(400, self.conn.problem or msg).body())
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        events: list[Any] = [
            h11.Response(status_code=400, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        with contextlib.suppress(h11.LocalProtocolError):
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self._drops = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write_eof()
        self._lingering.start(LINGER_SECONDS, self.transport.close)

    def _read_at_most(self, num_bytes: int) -> None:
        if hasattr(self.transport, "max_size"):  # asyncio's own transports read so many at a time
            self.transport.max_size = num_bytes

    def _expect_request(self) -> None:
        if not self._receiving.runs:
            self._receiving.start(self._receive_seconds, self.transport.abort)

    def _probe(self) -> None:
        """Writes a probe to a client that sends no more, and plans the next one.

        A client that is gone answers the probe with a reset, which ends the connection.
        """
        if self.cycle.response_complete or self.transport.is_closing():
            return
        event: Any = None
        if self.cycle.response_started:
            if comment := self.cycle.scope["state"].get("comment"):
                event = h11.Data(data=comment)
        elif self.cycle.scope["http_version"] < "1.1":  # HTTP/1.0 has no interim answers
            self.transport.close()
        else:
            event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        # Bytes that still wait to be sent are a probe themselves.
        if event is not None and not self.transport.get_write_buffer_size():
            self.transport.write(self.conn.send(event) or b"")
        self._probe_seconds = min(4 * self._probe_seconds, MAX_PROBE_SECONDS)
        # A probe of a connection that was closed meanwhile does nothing.
        self._probing.start(self._probe_seconds, self._probe)

    def _watch_reader(self, num_unread: int) -> None:
        self._sending.start(self._send_seconds, lambda: self._cut_if_not_read(num_unread))

    def _cut_if_not_read(self, num_unread: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < num_unread:
            self._watch_reader(left)  # the client is slow, but it reads
        else:
            if self.scope is not None:
                self.scope["state"]["cut_because"] = "slow_reader"
            self.transport.abort()


async def no_room(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a connection for which there is no place."""
    headers = {**RETRY_AFTER, "connection": "close"}
    error = ApiError(
        503, "There are too many connections", code="too_many_connections", headers=headers
    )
    await send_error(error, scope, receive, send)
