"""Runs the batches of `/v1/batches`, one after the other, next to other requests.

    validating ─▶ in_progress ─▶ finalizing ─▶ completed
                       │ └─▶ cancelling ─▶ cancelled
                       └─▶ failed

A batch that a server leaves in progress goes on when a server starts with the same directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute

from jaxpage.errors import ConfigError, EngineFailed, ShuttingDown
from jaxpage.private_files import open_private
from jaxpage.serving.batches.in_process import InProcess
from jaxpage.serving.batches.ordering import LINE_EXTRA_BYTES, num_lines
from jaxpage.serving.batches.output_file import Counts, OutputFile, outline
from jaxpage.serving.batches.running import BatchRun
from jaxpage.serving.batches.store import OPEN, Record, Store
from jaxpage.serving.metrics.metrics import ServerMetrics
from jaxpage.serving.requests.in_flight import InFlightRequests
from jaxpage.serving.settings.server_config import ServerConfig
from jaxpage.serving.wire.errors import scrub

logger = logging.getLogger(__name__)
MAX_LINES = 50_000  # OpenAI's limit


class BatchFailed(Exception):
    """Says why a batch cannot go on.

    Attributes:
        code: The name of the reason.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Batches:
    """Runs batches on the event loop of the server.

    Attributes:
        store: The files and the records.
    """

    def __init__(
        self,
        store: Store,
        client: InProcess,
        *,
        num_at_once: int,
        max_line_bytes: int,
        is_dead: Callable[[], bool],
        is_closing: Callable[[], bool],
    ) -> None:
        """Makes a runner that is not started.

        Args:
            store: The files and the records.
            client: Sends requests to the server's routes.
            num_at_once: The most requests at a time.
            max_line_bytes: The longest line of a batch.
            is_dead: Tells whether the engine has ended.
            is_closing: Tells whether the server accepts no more requests.
        """
        self.store = store
        self._client = client
        self._num_at_once = num_at_once
        self._max_line_bytes = max_line_bytes
        self._is_dead = is_dead
        self._is_closing = is_closing
        self._waiting: asyncio.Queue[Record] = asyncio.Queue()
        self._working: asyncio.Task[None] | None = None
        self._running: tuple[str, asyncio.Task[None]] | None = None

    def start(self) -> None:
        """Starts to work; batches that another server left come first."""
        for record in self.store.every("batch"):
            if record["status"] in OPEN:
                self._waiting.put_nowait(record)
        self._working = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Stops; batches that have not ended stay as they are on the disk."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
        self.store.close()

    async def add(self, record: Record, owner: str) -> None:
        """Stores a new batch, and runs it when those before it have ended."""
        self.store.put(record, owner)
        try:
            await asyncio.to_thread(self.store.write, record)
        except OSError:
            self.store.forget(record)
            raise
        self._waiting.put_nowait(record)

    async def cancel(self, record: Record) -> Record:
        """Asks a batch that has not ended to end, and returns it as it is then.

        What is answered stays.
        """
        if record["status"] not in ("validating", "in_progress"):
            return record
        # `_run` learns from the status why its task was cancelled, so the status comes first.
        writing = self._change(record, "cancelling")
        if self._running is not None and self._running[0] == record["id"]:
            self._running[1].cancel()
        # The record may change again while it is written.
        cancelled = dict(record)
        await writing
        return cancelled

    async def _work(self) -> None:
        while True:
            record = await self._waiting.get()
            try:
                await self._answer(record)
            except (EngineFailed, ShuttingDown) as error:
                logger.warning("batch %s stops until the next start: %s", record["id"], error)
                return
            except BatchFailed as error:
                await self._fail(record, error.code, str(error))
            except ConfigError as error:
                await self._fail(record, "invalid_file", str(error))
            except OSError as error:
                await self._fail(record, "storage_error", error.strerror or "a file cannot be used")
            except Exception:
                logger.exception("batch %s cannot go on", record["id"])
                await self._fail(record, "server_error", "The server failed to run this batch")

    async def _answer(self, record: Record) -> None:
        batch_id = record["id"]
        source = self.store.content(record["input_file_id"])
        if not source.is_file():
            raise BatchFailed("invalid_file", "The input file does not exist any more")
        answers = self.store.answers(batch_id)
        with await asyncio.to_thread(OutputFile, answers) as output:
            total = await asyncio.to_thread(num_lines, source, self._max_line_bytes, output.done)
            if not 0 < total <= MAX_LINES:
                raise BatchFailed(
                    "invalid_file", f"The input must have 1 to {MAX_LINES} lines, not {total}"
                )
            self._count(record, output.counts, total)
            if record["status"] == "validating":
                await self._change(record, "in_progress")
            if record["status"] == "in_progress":
                await self._run(record, output, total)
        if record["status"] == "in_progress":
            await self._change(record, "finalizing")
        await self._finish(record)

    async def _run(self, record: Record, output: OutputFile, total: int) -> None:
        def report() -> None:
            self._count(record, output.counts, total)
            # The size is that of all files, so it is not looked up for each line.
            if output.counts.lines % 64 == 0 and self.store.num_bytes > self.store.max_bytes:
                raise BatchFailed(
                    "storage_full", "The answers do not fit into the server's storage"
                )

        run = BatchRun(
            self._client,
            output,
            num_at_once=self._num_at_once,
            max_line_bytes=self._max_line_bytes,
            is_dead=self._is_dead,
            is_closing=self._is_closing,
            on_answer=report,
            url=record["endpoint"],
            owner=self.store.owner(record["id"]),
        )
        running = asyncio.create_task(run.run(self.store.content(record["input_file_id"])))
        self._running = (record["id"], running)
        try:
            await running
        except asyncio.CancelledError:
            # A client cancels the inner task alone; at a shutdown this task is cancelled, too.
            this_task = asyncio.current_task()
            is_stopped = this_task is not None and this_task.cancelling()
            if record["status"] != "cancelling" or is_stopped:
                raise
        finally:
            self._running = None
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _finish(self, record: Record) -> None:
        """Makes files of the answers, and ends the batch."""
        answers = self.store.answers(record["id"])
        owner = self.store.owner(record["id"])
        # The ids follow from the batch's, so that a second try after a kill makes no second files.
        name = record["id"].removeprefix("batch_")
        kinds = ("output", "errors")
        ids = [f"file-{name}-{kind}" for kind in kinds]
        await asyncio.to_thread(_divide, answers, *map(self.store.content, ids))
        for kind, field, file_id in zip(
            kinds, ("output_file_id", "error_file_id"), ids, strict=True
        ):
            if self.store.content(file_id).stat().st_size:
                filename = f"{record['id']}_{kind}.jsonl"
                await asyncio.to_thread(
                    self.store.add_file, filename, "batch_output", owner, file_id
                )
                record[field] = file_id
            else:
                self.store.content(file_id).unlink()
        await self._change(record, "cancelled" if record["status"] == "cancelling" else "completed")
        # A batch that goes on after a kill needs its answers, so they go last.
        await asyncio.to_thread(answers.unlink, missing_ok=True)

    async def _fail(self, record: Record, code: str, message: str) -> None:
        problem = {"code": code, "message": scrub(message), "line": None, "param": None}
        record["errors"] = {"object": "list", "data": [problem]}
        # The disk may be what failed.
        with contextlib.suppress(OSError):
            await self._change(record, "failed")
            await asyncio.to_thread(self.store.answers(record["id"]).unlink, missing_ok=True)

    def _change(self, record: Record, status: str) -> Awaitable[None]:
        """Changes the status at once, and returns what waits until it is written."""
        record["status"] = status
        record[f"{status}_at"] = int(time.time())
        return asyncio.ensure_future(asyncio.to_thread(self.store.write, record))

    def _count(self, record: Record, counts: Counts, total: int) -> None:
        completed = counts.lines - counts.errors
        record["request_counts"] = {
            "total": total,
            "completed": completed,
            "failed": counts.errors,
        }
        record["usage"] = {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens},
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        }


def open_batches(
    config: ServerConfig,
    visitors: InFlightRequests,
    routes: Sequence[BaseRoute],
    metrics: ServerMetrics,
    *,
    num_at_once: int,
    is_dead: Callable[[], bool],
) -> Batches | None:
    """Returns the runner of batches; None without `batch_directory`.

    Args:
        config: The settings of the server.
        visitors: The counter of the requests for which a shutdown waits.
        routes: The routes that answer the lines.
        metrics: The counters of the server.
        num_at_once: The most lines at a time.
        is_dead: Tells whether the engine has ended.

    Raises:
        ConfigError: The directory cannot be used.
    """
    if config.batch_directory is None:
        return None
    return Batches(
        Store(Path(config.batch_directory), config.batch_directory_bytes),
        InProcess(routes, config, metrics),
        num_at_once=num_at_once,
        max_line_bytes=config.max_body_bytes + LINE_EXTRA_BYTES,
        is_dead=is_dead,
        is_closing=lambda: visitors.is_closed,
    )


def _divide(answers: Path, good: Path, bad: Path) -> None:
    """Writes the lines that were answered to one file, and those with an error to another."""
    with (
        answers.open("rb") as lines,
        open_private(good, "wb") as output,
        open_private(bad, "wb") as errors,
    ):
        for line in lines:
            response: dict[str, Any] | None = outline(line)["response"]
            is_good = response is not None and response["status_code"] == 200
            (output if is_good else errors).write(line)
