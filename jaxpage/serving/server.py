"""Runs a server from its first connection to its exit status.

It starts uvicorn and the engine's thread, waits for a signal or the engine's death, and shuts down:

    signal ─▶ no new requests ─▶ running ones finish ─▶ the rest end with an error ─▶ exit
              (503)              shutdown_timeout       PARTING_SECONDS
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette

from jaxpage.errors import JaxpageError
from jaxpage.serving.app import Server
from jaxpage.serving.http.connection import Connection, no_room
from jaxpage.serving.http.descriptors import Complaints, room_for_connections
from jaxpage.serving.http.envelope import Envelope
from jaxpage.serving.metrics.logs import log_activity
from jaxpage.serving.metrics.tracing import SpanWriter
from jaxpage.serving.settings.server_config import ServerConfig

logger = logging.getLogger(__name__)
FIRST_BYTE_SECONDS = 5.0  # the time for a connection's first byte; clients may connect beforehand
HEADER_SECONDS = 5.0  # the time for a request in addition to that for its body
# The time in which requests that ended early get their error, and the engine's thread ends.
PARTING_SECONDS = 5.0
# The time from the second signal to the end of the process, whatever is still being done.
HURRIED_SECONDS = 2.0


def run_app(
    app: Starlette,
    driver: Driving,
    config: ServerConfig,
    listener: socket.socket,
    *,
    announce: Callable[[], None],
    is_loading: Callable[[], bool] = lambda: False,
) -> int:
    """Serves an application until a signal comes or its driver ends.

    After the first SIGINT or SIGTERM running requests finish; the second ends them at once.

    Args:
        app: The application.
        driver: The driver of its engine, or of several.
        config: The settings of the server.
        listener: The server's socket, which is bound but does not listen.
        announce: Called once connections are answered.
        is_loading: Returns whether a model is being loaded, for which a shutdown does not wait.

    Returns:
        The exit status: 0 after one signal, also if the deadline has ended requests; 1 after a
        second signal or the death of an engine.
    """
    config = config.model_copy(
        update={"max_connections": room_for_connections(config.max_connections)}
    )
    # A server that starts after this one must not fail on the connections that this one leaves.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        status = asyncio.run(_serve(app, driver, config, listener, announce))
    finally:
        has_ended = driver.stop(PARTING_SECONDS)
    if not has_ended:
        logger.critical("an engine is still at work; the process ends without it")
        os._exit(1)
    # Python waits for the threads of a pool at its exit, also for one that loads a model.
    if is_loading():
        os._exit(status)
    return status


async def _serve(
    app: Starlette,
    driver: Driving,
    config: ServerConfig,
    listener: socket.socket,
    announce: Callable[[], None],
) -> int:
    serving = Serving(app, driver, config, listener, announce)

    def handle_signal(number: int) -> None:
        serving.signal()
        action = (
            "ending at once"
            if serving.is_hurried
            else "finishing what runs; a second signal ends it at once"
        )
        logger.info("%s: %s", signal.Signals(number).name, action)
        if serving.is_hurried:
            # Without the timer a step of the engine or a thread that waits could keep the process
            # alive for long.
            ending = threading.Timer(HURRIED_SECONDS, _end_process)
            ending.daemon = True
            ending.start()

    asyncio.get_running_loop().set_exception_handler(Complaints())
    with _handle_signals(handle_signal):
        return await serving.run()


class Driving(Protocol):
    """Drives one engine, as `AsyncDriver` does, or several."""

    @property
    def termination(self) -> Future[None]:
        """Returns a future that ends with the engines."""
        ...

    def start(self) -> None:
        """Begins to drive, on the event loop that runs."""
        ...

    async def stats(self) -> Mapping[str, Any]:
        """Returns the values of all metrics, or raises JaxpageError if there are none."""
        ...

    async def wait_until_drained(self, timeout: float | None, subject: str = "The engine") -> bool:
        """Accepts no more requests, and waits until all have finished."""
        ...

    def stop(self, timeout: float | None = None) -> bool:
        """Ends everything; returns False if an engine is still in a step."""
        ...


class Serving:
    """One run of a server, on its event loop."""

    def __init__(
        self,
        app: Starlette,
        driver: Driving,
        config: ServerConfig,
        listener: socket.socket,
        announce: Callable[[], None],
    ) -> None:
        self._server: Server = app.state.server
        self._tracing: SpanWriter | None = app.state.tracing
        self._driver = driver
        self._shutdown_seconds = config.shutdown_timeout_seconds
        self._listener = listener
        # The connections inherit this. Without it the body of an answer waits up to 40 ms for the
        # client's acknowledgement of the head. asyncio sets it only on sockets whose protocol is
        # TCP by number, and that of this socket is 0.
        if listener.family != socket.AF_UNIX:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._signalled = asyncio.Event()
        self._hurried = asyncio.Event()
        self._uvicorn = _Uvicorn(_settings(app, config), announce)

    def signal(self) -> None:
        """Asks the server to end, and at the second call to end at once; call it on the loop."""
        (self._hurried if self._signalled.is_set() else self._signalled).set()

    @property
    def is_hurried(self) -> bool:
        """Returns whether the server was asked twice to end."""
        return self._hurried.is_set()

    async def run(self) -> int:
        """Starts the engine's thread, serves, and returns the exit status.

        The caller stops the engine's thread.
        """
        self._driver.start()
        batches = self._server.batches
        if batches is not None:
            batches.start()
        serving = asyncio.ensure_future(self._uvicorn.serve([self._listener]))
        died = asyncio.ensure_future(_wait_for_end(self._driver))
        signalled = asyncio.ensure_future(self._signalled.wait())
        hurried = asyncio.ensure_future(self._hurried.wait())
        activity = asyncio.ensure_future(log_activity(self._driver.stats))
        try:
            await _first(serving, died, signalled)
            self._server.visitors.is_closed = True
            await _first(
                self._server.visitors.wait_until_idle(self._shutdown_seconds), died, hurried
            )
            status = 1 if died.done() else 0
            await _first(self._part(), hurried)
            if hurried.done():
                status = 1
                self._uvicorn.cut()
            self._uvicorn.should_exit = True
            await serving
            return status
        finally:
            for task in (died, signalled, hurried, activity):
                task.cancel()
            await asyncio.gather(died, signalled, hurried, activity, return_exceptions=True)
            if batches is not None:
                await batches.stop()
            self._server.preparing.close()
            await asyncio.to_thread(self._server.responses.close)
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    async def _part(self) -> None:
        """Ends the remaining requests with an error, waits until it is sent, and stops the engine.

        The streams of the inspector end with the engine's thread.
        """
        with contextlib.suppress(TimeoutError, JaxpageError):
            await asyncio.wait_for(
                self._driver.wait_until_drained(0, "The server"), PARTING_SECONDS
            )
        await self._server.visitors.wait_until_idle(PARTING_SECONDS)
        await asyncio.to_thread(self._driver.stop, PARTING_SECONDS)


class _Uvicorn(uvicorn.Server):
    """A uvicorn server without signal handlers of its own.

    They would end the process by the signal instead of with an exit status.
    """

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Captures no signals."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens the sockets, and announces that connections are answered."""
        await super().startup(sockets)
        self._announce()

    def cut(self) -> None:
        """Cuts all connections, whatever they wait for."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _settings(app: Starlette, config: ServerConfig) -> uvicorn.Config:
    connection: Any = functools.partial(
        Connection,
        silent_seconds=FIRST_BYTE_SECONDS,
        receive_seconds=HEADER_SECONDS + config.body_timeout_seconds,
        send_seconds=config.slow_reader_seconds,
        max_connections=config.max_connections,
        no_room=Envelope(no_room, app.state.server.metrics),
    )
    return uvicorn.Config(
        app,
        http=connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=config.keep_alive_seconds,
        timeout_graceful_shutdown=int(PARTING_SECONDS),
    )


@contextlib.contextmanager
def _handle_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Handles SIGINT, SIGTERM and SIGHUP while the context lasts.

    Outside the main thread it does nothing: Python delivers signals to the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    handlers: dict[int, Callable[[], None]] = {
        **{number: functools.partial(handle, number) for number in (signal.SIGINT, signal.SIGTERM)},
        signal.SIGHUP: _hung_up,
    }
    before = {number: signal.getsignal(number) for number in handlers}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
            # The loop has put back the default, and not what was there before.
            signal.signal(number, before[number])


def _hung_up() -> None:
    logger.warning("SIGHUP is ignored: restart the server to change settings")


def _end_process() -> None:
    logger.critical("work is still running; the process ends without waiting for it")
    os._exit(1)


async def _wait_for_end(driver: Driving) -> None:
    with contextlib.suppress(Exception):  # the driver has logged it
        await asyncio.wrap_future(driver.termination)


async def _first(*awaitables: Awaitable[Any]) -> None:
    """Waits until one of the awaitables is done, then cancels the coroutines; tasks go on."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, awaitable in zip(tasks, awaitables, strict=True):
        if task is not awaitable:
            task.cancel()
