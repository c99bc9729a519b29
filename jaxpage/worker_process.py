"""Runs a module of jaxpage as a process of its own that answers lines of JSON, and that can be killed with all that it does."""

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

# beyond its own deadlines the process is taken for dead: its start imports and reads
_GRACE_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1


class WorkerGoneError(JaxpageError):
    """The process ended by itself, or was killed."""


class WorkerProcess:
    """One process, for one caller at a time. It ends with `close`, with this object, and with the program.

    Attributes:
        kill: ends the process at once, from any thread.
        close: ends it and closes its pipes, when nobody waits for an answer.
    """

    def __init__(self, module: str, task: str) -> None:
        """Starts the process.

        Args:
            module: the name of a module that reads lines of JSON and writes one for each.
            task: what the process is called in errors.
        """
        path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._task = task
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,  # Ctrl-C is not meant for it
        )
        self.kill = partial(_kill, self._process, os.getpid())
        self.close = weakref.finalize(self, _end, self._process, os.getpid())

    def say(self, line: str) -> None:
        """Writes a line that has no answer. Raises WorkerGoneError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerGoneError(f"{self._task} has ended, again and again") from error

    def asked(self, question: Any, seconds: float) -> Any:
        """Returns the answer to a question; both are values of JSON.

        Args:
            seconds: what the process allows itself for the answer.

        Raises:
            WorkerGoneError: The process has ended.
            JaxpageError: The process does not answer.
        """
        self.say(json.dumps(question))
        assert self._process.stdout is not None
        # a program may have more files open than `select` can name
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds + _GRACE_SECONDS):
                raise JaxpageError(f"{self._task} does not answer")
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise WorkerGoneError(f"{self._task} has ended, again and again")
        return json.loads(line)


def die_with_parent() -> None:
    """Ends the calling process as soon as its parent ends, where the system can do that (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill(process: subprocess.Popen[str], creator_pid: int) -> None:
    """Kills the process and its children. A program that was forked off the one that made it has no say in it."""
    if process.returncode is None and os.getpid() == creator_pid:
        # macOS says the latter of the dead
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own is a group


def _end(process: subprocess.Popen[str], creator_pid: int) -> None:
    if os.getpid() != creator_pid:
        return
    _kill(process, creator_pid)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what was not written yet
            pipe.close()
    process.wait()
