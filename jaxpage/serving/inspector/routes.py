"""Makes the routes of the inspector page: its files, and snapshots of the engine.

They exist only where the setting `ui` is on. The files are the same for everybody and tell nothing
about the server, so they need no API key (`PAGE_PATHS`); the paths below /debug need one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from jaxpage.engine import Engine
from jaxpage.errors import JaxpageError
from jaxpage.serving.http.host_guard import check_origin
from jaxpage.serving.http.request_limits import check_is_json
from jaxpage.serving.inspector.pacing import Pace
from jaxpage.serving.inspector.state import Inspector, Snapshot
from jaxpage.serving.wire.body import check_fields, parse_object
from jaxpage.serving.wire.encoding import COMMENT, encode_parts, event
from jaxpage.serving.wire.errors import RETRY_AFTER, ApiError
from jaxpage.settings.argument_checks import show

_Result = TypeVar("_Result")

SECONDS_BETWEEN_SNAPSHOTS = 0.1
SECONDS_BETWEEN_COMMENTS = 15.0  # comments keep an idle stream open
MAX_VIEWERS = 16  # the most streams at the same time
MAX_SECONDS_PER_STEP = 2.0  # the slowest motion

_DIRECTORY = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_FILES = {f"/ui/{path.name}": path for path in _DIRECTORY.iterdir() if path.suffix in _TYPES}
PAGE_PATHS = frozenset({"/", "/ui", "/ui/", *_FILES})

# The page may load nothing but its own files, and has no inline code or style. No other page may
# put it into a frame, and no script may make HTML of a string.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src "
    "'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
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


class InspectedDriver(Protocol):
    """The driver of an engine, as the page needs it; the server's is an `AsyncDriver`.

    Attributes:
        before_step: Called before each step, with a function that says whether the driver has
            orders; returns whether the step may run.
    """

    before_step: Callable[[Callable[[], bool]], bool] | None

    @property
    def ready(self) -> bool:
        """Returns False when the server is about to end; streams end then, too."""

    async def snapshot(self, function: Callable[[Engine], _Result], /) -> _Result:
        """Runs a function on the engine between two of its steps, and returns the result."""


def routes(
    driver: InspectedDriver, *, show_prompts: bool, can_be_slow: bool = False
) -> list[BaseRoute]:
    """Returns all routes of the page.

    Args:
        driver: The driver of the engine.
        show_prompts: Snapshots have the prompts of all users.
        can_be_slow: Viewers may ask for slow motion, which delays the requests of everybody.
    """
    return [
        *page_routes(),
        *state_routes(driver, show_prompts=show_prompts, can_be_slow=can_be_slow),
    ]


def page_routes() -> list[BaseRoute]:
    """Returns the routes of the page's files, which open recorded event logs without an engine."""

    async def from_root(request: Request) -> Response:
        return RedirectResponse("ui/", 307)  # temporary: without the page, / is the server's index

    async def to_page(request: Request) -> Response:
        return RedirectResponse("ui/", 308)

    files = [_file(name, path) for name, path in _FILES.items()]
    return [
        Route("/", from_root),
        Route("/ui", to_page),
        _file("/ui/", _DIRECTORY / "index.html"),
        *files,
    ]


def _file(name: str, path: Path) -> Route:
    content = path.read_bytes()
    kind = _TYPES[path.suffix]

    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return Route(name, answer)


def state_routes(
    driver: InspectedDriver, *, show_prompts: bool, can_be_slow: bool = False
) -> list[BaseRoute]:
    """Returns the routes of snapshots: one snapshot, or a stream of them as they change.

    Args:
        driver: The driver of the engine.
        show_prompts: Snapshots have the prompts of all users.
        can_be_slow: Viewers may ask for slow motion, which delays the requests of everybody.
    """
    feed = _Feed(driver, Inspector(show_prompts=show_prompts), can_be_slow=can_be_slow)

    async def state(request: Request) -> Response:
        _, body = await feed.latest()
        return Response(body, media_type="application/json", headers=_PRIVATE)

    async def events(request: Request) -> Response:
        """Streams snapshots; a POST may ask for slow motion.

        Slow motion delays others, so no link and no image may lead to it.
        """
        if feed.num_viewers >= MAX_VIEWERS:
            raise ApiError(
                503,
                f"The inspector has {MAX_VIEWERS} viewers already, and no more are allowed; "
                "close one",
                headers=RETRY_AFTER,
            )
        if "seconds_per_step" in request.query_params:
            raise ApiError(
                400, "seconds_per_step must be in the body of a POST", param="seconds_per_step"
            )
        seconds = 0.0
        if request.method == "POST":
            check_origin(request.headers)
            check_is_json(request.headers)
            body = await asyncio.to_thread(parse_object, await request.body())
            check_fields(body, {"seconds_per_step"})
            seconds = _seconds_per_step(body.get("seconds_per_step", 0), can_be_slow=can_be_slow)
        # The connection sends this comment to find out whether the viewer is still there.
        request.scope["state"]["comment"] = COMMENT
        return StreamingResponse(
            feed.events(seconds), media_type="text/event-stream", headers=_PRIVATE
        )

    return [Route("/debug/state", state), Route("/debug/events", events, methods=["GET", "POST"])]


def _seconds_per_step(value: Any, *, can_be_slow: bool) -> float:
    """Returns the least time of a step that a viewer asks for; 0.0 without slow motion."""
    seconds = (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    )
    if not 0 <= seconds <= MAX_SECONDS_PER_STEP:
        message = (
            f"seconds_per_step is {show(value)}; it must be a number from 0 to "
            f"{MAX_SECONDS_PER_STEP:g}"
        )
        raise ApiError(400, message, param="seconds_per_step")
    if seconds and not can_be_slow:
        raise ApiError(
            403,
            "Slow motion delays the requests of everybody, so it exists only where the "
            "server listens on this machine alone",
            param="seconds_per_step",
        )
    return seconds


def _encode(snapshot: Snapshot) -> bytes:
    return b"".join(encode_parts(snapshot))


class _Feed:
    """Makes the snapshots for all viewers together, at most ten times a second.

    It makes none unless somebody asks.
    """

    def __init__(
        self, driver: InspectedDriver, inspector: Inspector, *, can_be_slow: bool = False
    ) -> None:
        self.num_viewers = 0
        self._driver = driver
        self._pace = Pace()
        driver.before_step = self._pace.lets_step
        self._inspector = inspector
        self._can_be_slow = can_be_slow
        self._lock = asyncio.Lock()
        self._due = 0.0  # the time from which on the next snapshot may be made
        self._content: Snapshot = {}  # the last snapshot without its time
        self._version = 0
        self._body = b""

    async def latest(self) -> tuple[int, bytes]:
        """Returns a number that grows when something changes, and the newest snapshot as JSON.

        Raises:
            JaxpageError: The engine has ended; see `AsyncDriver.snapshot`.
        """
        async with self._lock:
            if time.monotonic() >= self._due:
                snapshot = await self._driver.snapshot(self._inspector.inspect)
                snapshot["pace"] = {
                    "seconds_per_step": self._pace.seconds,
                    "can_be_slow": self._can_be_slow,
                }
                # The time is another one in each snapshot, and no change to show.
                content = {**snapshot, "clock": None}
                if content != self._content:
                    self._content = content
                    self._version = self._version + 1
                self._body = await asyncio.to_thread(_encode, snapshot)
                self._due = time.monotonic() + SECONDS_BETWEEN_SNAPSHOTS
            return self._version, self._body

    async def events(self, seconds_per_step: float = 0.0) -> AsyncIterator[bytes]:
        """Yields snapshots as events, as long as the viewer is there.

        Args:
            seconds_per_step: The least time of a step meanwhile.
        """
        self.num_viewers += 1
        try:
            with self._pace.hold(seconds_per_step):
                async for frame in self._frames():
                    yield frame
        except JaxpageError:
            return  # the engine has ended, and with it the stream
        finally:
            self.num_viewers -= 1

    async def _frames(self) -> AsyncIterator[bytes]:
        shown = 0
        quiet_since = time.monotonic()
        while self._driver.ready:
            version, body = await self.latest()
            if version != shown:
                shown = version
                quiet_since = time.monotonic()
                yield event(body)
            elif time.monotonic() - quiet_since > SECONDS_BETWEEN_COMMENTS:
                quiet_since = time.monotonic()
                yield COMMENT
            await asyncio.sleep(SECONDS_BETWEEN_SNAPSHOTS)
