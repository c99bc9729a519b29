"""Runs a module of jaxpage as a process that answers lines of JSON.

The process can be killed at any time, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

from jaxpage.errors import JaxpageError

# This is added to the process's own deadline, because its start has to import modules and read
# files. After it the process counts as dead.
_GRACE_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1  # as in <linux/prctl.h>


class WorkerGoneError(JaxpageError):
    """Says that the process ended by itself, or was killed."""


class WorkerProcess:
    """Runs one process, for one caller at a time.

    The process ends with `close`, with this object, and with the program.

    Attributes:
        kill: Ends the process at once, from any thread.
        close: Ends it and closes its pipes; nobody may be waiting for an answer.
    """

    def __init__(self, module: str, task: str) -> None:
        """Starts the process.

        Args:
            module: The name of a module that reads lines of JSON and writes one for each.
            task: The name of the process in errors.
        """
        # `-P` keeps the working directory off the path, where any json.py would be taken for
        # Python's own, so the path has to name the package.
        path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._task = task
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,  # keeps Ctrl-C from it
        )
        self.kill = partial(_kill, self._process, os.getpid())
        # The finalizer must not refer to this object, or the object would never be freed.
        self.close = weakref.finalize(self, _end, self._process, os.getpid())

    def say(self, line: str) -> None:
        """Writes a line that has no answer.

        Raises:
            WorkerGoneError: The process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerGoneError(f"{self._task} has ended, again and again") from error

    def ask(self, question: Any, seconds: float) -> Any:
        """Returns the answer to a question; both are values of JSON.

        Args:
            question: The question.
            seconds: The time that the process allows itself for the answer.

        Raises:
            WorkerGoneError: The process has ended.
            JaxpageError: The process does not answer.
        """
        self.say(json.dumps(question))
        assert self._process.stdout is not None
        # A program may have more files open than `select` can handle.
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            # The selector sees the pipe and not Python's buffer of it. That buffer is empty here,
            # because a question has one line as its answer.
            if not selector.select(seconds + _GRACE_SECONDS):
                raise JaxpageError(f"{self._task} does not answer")
        line = self._process.stdout.readline()
        # At the end of the stream `readline` returns what there is of a line, or nothing.
        if not line.endswith("\n"):
            raise WorkerGoneError(f"{self._task} has ended, again and again")
        return json.loads(line)


def die_with_parent() -> None:
    """Makes the calling process end as soon as its parent ends, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill(process: subprocess.Popen[str], creator_pid: int) -> None:
    """Kills the process and its children, unless this program was forked off its creator."""
    if process.returncode is None and os.getpid() == creator_pid:
        # macOS raises the latter for a dead process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its session is a process group, too


def _end(process: subprocess.Popen[str], creator_pid: int) -> None:
    if os.getpid() != creator_pid:
        return
    _kill(process, creator_pid)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # a line was not written yet
            pipe.close()
    process.wait()
