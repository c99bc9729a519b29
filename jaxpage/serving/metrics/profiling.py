"""Writes traces of the JAX profiler, for debugging.

Only a server with `profile_directory` does so, and no trace is longer than a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import jax
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxpage.serving.http.answers import json_answer
from jaxpage.serving.http.host_guard import check_origin
from jaxpage.serving.http.request_limits import check_is_json
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.wire.errors import ApiError

logger = logging.getLogger(__name__)

MAX_SECONDS = 60.0  # a trace grows in memory until it ends


class Profiler:
    """Traces everything that this process does, one trace at a time; used on one event loop."""

    def __init__(self, directory: str):
        self._directory = directory
        self._trace: asyncio.Task[None] | None = None
        self._enough = asyncio.Event()

    async def start(self) -> bool:
        """Begins a trace, which ends by itself after a minute.

        Returns:
            False if there is one already.
        """
        if self._trace is not None and not self._trace.done():
            return False
        await asyncio.to_thread(jax.profiler.start_trace, self._directory)
        self._enough.clear()
        self._trace = asyncio.create_task(self._until_enough())
        return True

    async def stop(self) -> bool:
        """Ends the trace, and waits until it is written.

        Returns:
            False if there is none.
        """
        if self._trace is None or self._trace.done():
            return False
        self._enough.set()
        await self._trace
        return True

    async def _until_enough(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._enough.wait(), MAX_SECONDS)
        await asyncio.to_thread(jax.profiler.stop_trace)
        logger.info("a trace of the JAX profiler was written to %s", self._directory)


def profiler_routes(config: ServerConfig) -> list[Route]:
    """Returns the routes that begin and end a trace; none without `profile_directory`.

    Their paths, /start_profile and /stop_profile, are those of vLLM.
    """
    if config.profile_directory is None:
        return []
    profiler = Profiler(config.profile_directory)

    async def start_profile(request: Request) -> Response:
        await _check(request)
        return _answer(await profiler.start(), "started", "A trace is running already")

    async def stop_profile(request: Request) -> Response:
        await _check(request)
        return _answer(await profiler.stop(), "written", "No trace is running")

    return [
        Route(f"/{endpoint.__name__}", endpoint, methods=["POST"])
        for endpoint in (start_profile, stop_profile)
    ]


async def _check(request: Request) -> None:
    """Raises ApiError if a page of another site can send this request without the browser's leave.

    A browser sends other requests only after it has asked the server (CORS preflight).
    """
    check_origin(request.headers)
    if await request.body():
        check_is_json(request.headers)


def _answer(done: bool, status: str, refusal: str) -> Response:
    if not done:
        raise ApiError(409, refusal)
    return json_answer({"status": status})
