"""Renders chat templates in processes of their own, which are kept for the next request: see template_worker.py."""

from __future__ import annotations

import queue
import threading
from typing import Any

from jaxpage.worker_process import WorkerGoneError, WorkerProcess

# a request that finds all processes busy waits so long before it starts another
_SHARE_SECONDS = 0.1


class Renderers:
    """The processes that render, as many as there are threads that render at the same time."""

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        self._starting = threading.Lock()
        self._is_warm = False

    def warm(self) -> None:
        """Starts the first process, so that the first request does not wait for it."""
        with self._starting:
            if not self._is_warm:
                self._is_warm = True
                self._idle.put(_new())

    def rendered(self, request: dict[str, Any], seconds: float, num_bytes: int) -> str:
        """Returns the text of a request, as `template_worker` describes it.

        Raises:
            ValueError: What the template says, or that it takes too long or too much memory.
            JaxpageError: The process does not answer.
        """
        self.warm()
        for is_last in (False, True):
            worker = _new() if is_last else self._taken()
            try:
                problem, text = worker.asked([request, seconds, num_bytes], seconds)
            except (
                WorkerGoneError
            ):  # perhaps it was killed from outside: the template may not be the cause
                worker.close()
            except (
                BaseException
            ):  # an interrupt as well: its answer would be taken for the next one's
                worker.close()
                raise
            else:
                self._idle.put(worker)
                if text is None:
                    raise ValueError(problem or f"it took longer than {seconds:g} s")
                return str(text)
        raise ValueError(f"it takes more than {num_bytes >> 20} MiB of memory, or crashes")

    def _taken(self) -> WorkerProcess:
        try:
            return self._idle.get(timeout=_SHARE_SECONDS)
        except queue.Empty:
            return _new()


def _new() -> WorkerProcess:
    return WorkerProcess(
        "jaxpage.serving.wire.template_worker", "the process that renders chat templates"
    )


RENDERERS = Renderers()  # of this program: a process serves the templates of all models
