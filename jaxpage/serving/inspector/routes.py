"""The routes of the page: its files, and what it shows of the engine. They exist where the page is turned on, and not otherwise.

The files are the same for everybody and say nothing about the engine, so they need no key; what /debug answers does.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from jaxpage.engine.engine import Engine
from jaxpage.errors import JaxpageError
from jaxpage.serving.inspector.state import Inspector, Snapshot

_Result = TypeVar("_Result")

SECONDS_BETWEEN_SNAPSHOTS = 0.1
SECONDS_BETWEEN_COMMENTS = 15.0  # that keep an idle stream open
MOST_VIEWERS = 16  # streams at the same time

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
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
_PRIVATE = {**_HEADERS, "cache-control": "no-store"}


class Source(Protocol):
    """Who has the engine: the engine loop of the server."""

    async def snapshot(self, function: Callable[[Engine], _Result], /) -> _Result:
        """Runs a function of the engine between two of its steps."""


class Settings(Protocol):
    """What the page needs to know of the server's settings."""

    @property
    def ui_show_prompts(self) -> bool: ...


def routes(loop: Source, config: Settings) -> list[BaseRoute]:
    """All routes of the page."""
    return [*page_routes(), *state_routes(loop, config)]


def page_routes() -> list[BaseRoute]:
    """The page alone: it opens recorded event logs without an engine."""
    files = {path.name: path for path in (Path(__file__).parent / "static").iterdir() if path.suffix in _TYPES}
    contents = {name: (path.read_bytes(), _TYPES[path.suffix]) for name, path in files.items()}

    async def page(request: Request) -> Response:
        name = request.path_params.get("name") or "index.html"
        if name not in contents:
            return _refusal(404, f"The page has no file {name!r:.80}")
        content, kind = contents[name]
        return Response(content, media_type=kind, headers=_HEADERS)

    async def to_page(request: Request) -> Response:
        return RedirectResponse(f"{request.scope.get('root_path', '')}/ui/", 308)

    return [Route("/ui", to_page), Route("/ui/", page), Route("/ui/{name}", page)]


def open_paths() -> frozenset[str]:
    """The exact paths of the page's files."""
    files = (Path(__file__).parent / "static").iterdir()
    return frozenset({"/ui", "/ui/", *(f"/ui/{path.name}" for path in files if path.suffix in _TYPES)})


def state_routes(loop: Source, config: Settings) -> list[BaseRoute]:
    """Snapshots of the engine: one, or a stream of them as they change."""
    feed = _Feed(loop, Inspector(show_prompts=config.ui_show_prompts))

    async def state(request: Request) -> Response:
        try:
            return Response((await feed.latest())[1], media_type="application/json", headers=_PRIVATE)
        except JaxpageError as error:
            return _refusal(503, str(error))

    async def events(request: Request) -> Response:
        if feed.num_viewers >= MOST_VIEWERS:
            return _refusal(503, f"{MOST_VIEWERS} pages are looking at this engine already")
        return StreamingResponse(feed.events(), media_type="text/event-stream", headers=_PRIVATE)

    return [Route("/debug/state", state), Route("/debug/events", events)]


def _refusal(status: int, message: str) -> Response:
    kind = "not_found_error" if status == 404 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers=_PRIVATE)


class _Feed:
    """The newest snapshot, made at most ten times a second however many look, and never when nobody does."""

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
        """A number that grows when something changes, and the snapshot as JSON. Raises JaxpageError when the engine is gone."""
        async with self._lock:
            if time.monotonic() >= self._due:
                snapshot: dict[str, Any] = await self._loop.snapshot(self._inspector.inspect)
                content = {**snapshot, "clock": None}
                if content != self._content:
                    self._content, self._version = content, self._version + 1
                self._body = json.dumps(snapshot, separators=(",", ":")).encode()
                self._due = time.monotonic() + SECONDS_BETWEEN_SNAPSHOTS
            return self._version, self._body

    async def events(self) -> AsyncIterator[bytes]:
        self.num_viewers += 1
        shown, quiet_since = 0, time.monotonic()
        try:
            while True:
                version, body = await self.latest()
                if version != shown:
                    shown, quiet_since = version, time.monotonic()
                    yield b"data: " + body + b"\n\n"
                elif time.monotonic() - quiet_since > SECONDS_BETWEEN_COMMENTS:
                    quiet_since = time.monotonic()
                    yield b": still here\n\n"
                await asyncio.sleep(SECONDS_BETWEEN_SNAPSHOTS)
        except JaxpageError:
            return  # the engine is gone, and with it what there was to see
        finally:
            self.num_viewers -= 1
