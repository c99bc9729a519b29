"""Answers all lines of a batch: a bounded number at a time, each written when it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from jaxpage.errors import EngineFailed, ShuttingDown
from jaxpage.serving.batches.in_process import InProcess, InProcessAnswer
from jaxpage.serving.batches.lines import Line, write_answer
from jaxpage.serving.batches.ordering import DEFAULT_WINDOW, windows
from jaxpage.serving.batches.output_file import LARGE_LINE_BYTES, OutputFile

_TRY_AGAIN = (429, 503)  # the statuses of a server that has no room now
_FIRST_PAUSE_SECONDS = 0.1
_MAX_PAUSE_SECONDS = 5.0


class BatchRun:
    """Answers the lines of one file that are not answered yet.

    Attributes:
        max_line_bytes: The longest line that is read.
        window: The most lines that are ordered together.
        url: The path that all lines must name; None allows all.
    """

    def __init__(
        self,
        client: InProcess,
        output: OutputFile,
        *,
        num_at_once: int,
        max_line_bytes: int,
        is_dead: Callable[[], bool],
        is_closing: Callable[[], bool] = lambda: False,
        on_answer: Callable[[], None] = lambda: None,
        window: int = DEFAULT_WINDOW,
        url: str | None = None,
        owner: str = "",
    ) -> None:
        """Prepares a run.

        Args:
            client: Sends requests to the server's routes.
            output: The file of the answers.
            num_at_once: The most requests at a time.
            max_line_bytes: The longest line that is read.
            is_dead: Tells whether the engine has ended.
            is_closing: Tells whether the server accepts no more requests.
            on_answer: Called after each answer.
            window: The most lines that are ordered together.
            url: The path that all lines must name; None allows all.
            owner: The one who made the batch, and to whom stored responses belong.
        """
        self._owner = owner
        self.max_line_bytes = max_line_bytes
        self.window = window
        self.url = url
        self._client = client
        self._output = output
        self._places = asyncio.Semaphore(num_at_once)
        self._is_dead = is_dead
        self._is_closing = is_closing
        self._on_answer = on_answer
        self._writing = asyncio.Lock()

    async def run(self, path: Path) -> None:
        """Answers the lines of the input `path` that have no answer.

        Raises:
            EngineFailed: The engine has ended.
            ShuttingDown: The server accepts no more requests.
            OSError: A file cannot be read or written.
        """
        windows_of_lines = windows(
            path,
            self._output.done,
            window=self.window,
            max_bytes=self.max_line_bytes,
            url=self.url,
        )
        try:
            async with asyncio.TaskGroup() as group:
                # `next` returns None at the end, because no future takes a StopIteration.
                while lines := await asyncio.to_thread(next, windows_of_lines, None):
                    for line in lines:
                        if isinstance(line, Line):
                            # The place is taken before the task is made: a window of lines would
                            # else be as many tasks.
                            await self._places.acquire()
                            group.create_task(self._answer(line))
                        else:
                            await self._write(line.answer())
        except ExceptionGroup as errors:
            # Callers know kinds of single errors, and the later ones mostly follow from the first.
            raise errors.exceptions[0] from None

    async def _answer(self, line: Line) -> None:
        try:
            answer = await self._response(line)
            await self._write(write_answer(line, *answer))
        finally:
            self._places.release()

    async def _response(self, line: Line) -> InProcessAnswer:
        """Returns the server's answer to a line; it waits where the server has no room."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            answer = await self._client.post(line.url, line.body, self._owner)
            if answer.status >= 500 and self._is_dead():
                raise EngineFailed("The engine has ended before all lines were answered")
            if answer.status not in _TRY_AGAIN:
                return answer
            if self._is_closing():
                raise ShuttingDown("The server shuts down before all lines were answered")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    async def _write(self, line: bytes) -> None:
        # A large line is written on another thread, where no other line may come into it.
        async with self._writing:
            if len(line) <= LARGE_LINE_BYTES:
                self._output.append(line)
            else:
                await _to_the_end(asyncio.to_thread(self._output.append, line))
        self._on_answer()


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Awaits work on another thread; a caller that is cancelled goes on when the work has ended."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise
