"""Makes an answer once for many requests, so that asking again and again costs little."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from jaxpage.serving.dialects.registry import DIALECTS
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.encoding import encode
from jaxpage.serving.wire.openapi import openapi

_Answer = TypeVar("_Answer")


class Shared(Generic[_Answer]):
    """Makes answers that change all the time, one at a time and with a pause between two.

    A request gets an answer whose making began after the request came, so its values are true:

        request 1 ─▶ making ──────▶ answer for 1
        requests 2, 3, 4 wait       ├─ pause ─▶ making ─▶ one answer for 2, 3 and 4
    """

    def __init__(self, make: Callable[[], Awaitable[_Answer]], seconds: float) -> None:
        """Makes no answer yet.

        Args:
            make: Makes an answer.
            seconds: The least time from the beginning of one to that of the next.
        """
        self._make = make
        self._seconds = seconds
        self._began = -seconds
        self._last: asyncio.Future[_Answer] | None = None
        self._next: asyncio.Future[_Answer] | None = None

    async def answer(self) -> _Answer:
        """Returns an answer that is not older than the call; raises what making it raises."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._make_answer())
        # A request whose client leaves does not end the answer of others.
        return await asyncio.shield(self._next)

    async def _make_answer(self) -> _Answer:
        if self._last is not None and not self._last.done():
            await asyncio.wait([self._last])
        left = self._began + self._seconds - time.monotonic()
        if left > 0:
            await asyncio.sleep(left)
        self._began = time.monotonic()
        # Whoever asks from here on gets the next answer, as this one may be older than the call.
        self._last = self._next
        self._next = None
        return await self._make()


class OpenApiDocument:
    """Keeps the encoded OpenAPI document until the names of the models change."""

    def __init__(self, context: ModelContext) -> None:
        self._context = context
        self._making = asyncio.Lock()
        self._names: tuple[str, ...] = ()
        self._body = b""

    async def body(self) -> bytes:
        """Returns the document; it is made on another thread, once for all that ask for it."""
        async with self._making:
            names = (*self._context.model_names, *self._context.adapters)
            if names != self._names:
                self._body = await asyncio.to_thread(self._encode)
                self._names = names
            return self._body

    def _encode(self) -> bytes:
        return encode(openapi(self._context, [dialect.document for dialect in DIALECTS]))
