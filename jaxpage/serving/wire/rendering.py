"""Renders chat templates and processes pictures in processes of their own.

Later requests use a process again. The program of such a process is template_worker.py.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from jaxpage.worker_process import WorkerGoneError, WorkerProcess

# A request that finds all processes busy waits this long before it starts another one.
_SHARE_SECONDS = 0.1


class Renderers:
    """Holds the processes, about as many as there are threads that render at a time."""

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

    def render(self, request: dict[str, Any], seconds: float, num_bytes: int) -> str:
        """Returns the text of a request; see template_worker.py.

        Args:
            request: The template, the messages and the variables; or a picture.
            seconds: The processor time that it may take.
            num_bytes: The memory that it may take.

        Raises:
            ValueError: The template refuses the messages, the picture is refused, something fails,
                or it takes too long or too much memory.
            JaxpageError: The process does not answer.
        """
        self.warm()
        for is_last in (False, True):
            worker = _new() if is_last else self._take()
            try:
                problem, text = worker.ask([request, seconds, num_bytes], seconds)
            except WorkerGoneError:
                # Try once more: the process may have been killed from outside.
                worker.close()
            except BaseException:
                # Even after an interrupt: a late answer would be taken for the next request's.
                worker.close()
                raise
            else:
                self._idle.put(worker)
                if text is None:
                    raise ValueError(problem or f"it took longer than {seconds:g} s")
                return str(text)
        raise ValueError(f"it takes more than {num_bytes >> 20} MiB of memory, or crashes")

    def _take(self) -> WorkerProcess:
        try:
            return self._idle.get(timeout=_SHARE_SECONDS)
        except queue.Empty:
            return _new()


def _new() -> WorkerProcess:
    return WorkerProcess(
        "jaxpage.serving.wire.template_worker", "the process that renders chat templates"
    )


RENDERERS = Renderers()  # shared by all models: a process can render any template
