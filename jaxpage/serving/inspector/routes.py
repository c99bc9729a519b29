"""The routes of the page: its files, and what it shows of the engine. They exist where the page is turned on, and not otherwise.

The files are the same for everybody and tell nothing of the server, so they need no key (`PAGE_PATHS`); what lies below /debug does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from jaxpage.engine.engine import Engine
from jaxpage.errors import JaxpageError
from jaxpage.serving.inspector.state import Inspector, Snapshot
from jaxpage.serving.wire.dialects import COMMENT, encoded, event
from jaxpage.serving.wire.errors import RETRY_AFTER, ApiError

_Result = TypeVar("_Result")

SECONDS_BETWEEN_SNAPSHOTS = 0.1
SECONDS_BETWEEN_COMMENTS = 15.0  # which keep an idle stream open
MOST_VIEWERS = 16  # streams at the same time

_DIRECTORY = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FILES = {f"/ui/{path.name}": path for path in _DIRECTORY.iterdir() if path.suffix in _TYPES}
PAGE_PATHS = frozenset({"/", "/ui", "/ui/", *_FILES})

# Nothing but the page's own files, no inline code or style, no frame around it, and no way to make HTML of a string.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_PRIVATE = {"x-content-type-options": "nosniff", "cache-control": "no-store"}


class Source(Protocol):
    """Who has the engine: the `EngineLoop` of the server."""

    @property
    def ready(self) -> bool:
        """False when the server is about to end: then streams end too."""

    async def snapshot(self, function: Callable[[Engine], _Result], /) -> _Result:
        """Runs a function of the engine between two of its steps."""


def routes(loop: Source, *, show_prompts: bool) -> list[BaseRoute]:
    """All routes of the page."""
    return [*page_routes(), *state_routes(loop, show_prompts=show_prompts)]


def page_routes() -> list[BaseRoute]:
    """The page alone: it opens recorded event logs without an engine."""

    async def from_root(request: Request) -> Response:
        return RedirectResponse("ui/", 307)  # for now: without the page there is something else

    async def to_page(request: Request) -> Response:
        return RedirectResponse("/ui/", 308)

    files = [_file(name, path) for name, path in _FILES.items()]
    return [Route("/", from_root), Route("/ui", to_page), _file("/ui/", _DIRECTORY / "index.html"), *files]


def _file(name: str, path: Path) -> Route:
    content, kind = path.read_bytes(), _TYPES[path.suffix]

    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return Route(name, answer)


def state_routes(loop: Source, *, show_prompts: bool) -> list[BaseRoute]:
    """Snapshots of the engine: one, or a stream of them as they change."""
    feed = _Feed(loop, Inspector(show_prompts=show_prompts))

    async def state(request: Request) -> Response:
        _, body = await feed.latest()
        return Response(body, media_type="application/json", headers=_PRIVATE)

    async def events(request: Request) -> Response:
        if feed.num_viewers >= MOST_VIEWERS:
            raise ApiError(
                503,
                f"The inspector has {MOST_VIEWERS} viewers already, and no more are allowed; close one",
                headers=RETRY_AFTER,
            )
        request.scope["state"]["comment"] = COMMENT  # for who looks whether the viewer is still there
        return StreamingResponse(feed.events(), media_type="text/event-stream", headers=_PRIVATE)

    return [Route("/debug/state", state), Route("/debug/events", events)]


class _Feed:
    """The newest snapshot, made at most ten times a second for all viewers together, and never without one."""

    def __init__(self, loop: Source, inspector: Inspector) -> None:
        self.num_viewers = 0
        self._loop = loop
        self._inspector = inspector
        self._lock = asyncio.Lock()
        self._due = 0.0  # when the next one may be made
        self._content: Snapshot = {}  # of the last, without the time
        self._version = 0
        self._body = b""

    async def latest(self) -> tuple[int, bytes]:
        """A number that grows when something changes, and the snapshot as JSON. Raises what `EngineLoop.snapshot` raises."""
        async with self._lock:
            if time.monotonic() >= self._due:
                snapshot = await self._loop.snapshot(self._inspector.inspect)
                content = {**snapshot, "clock": None}
                if content != self._content:
                    self._content, self._version = content, self._version + 1
                self._body = encoded(snapshot)
                self._due = time.monotonic() + SECONDS_BETWEEN_SNAPSHOTS
            return self._version, self._body

    async def events(self) -> AsyncIterator[bytes]:
        self.num_viewers += 1
        shown, quiet_since = 0, time.monotonic()
        try:
            while self._loop.ready:
                version, body = await self.latest()
                if version != shown:
                    shown, quiet_since = version, time.monotonic()
                    yield event(body)
                elif time.monotonic() - quiet_since > SECONDS_BETWEEN_COMMENTS:
                    quiet_since = time.monotonic()
                    yield COMMENT
                await asyncio.sleep(SECONDS_BETWEEN_SNAPSHOTS)
        except JaxpageError:
            return  # the engine is gone, and with it what there was to see
        finally:
            self.num_viewers -= 1
