"""Runs parts of a check in processes of their own.

A part that hangs, crashes or breaks its GPU context does not stop the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.lab.kernel_lab.findings import FAILED, LEFT_OUT, Finding, append, read

POLL_S = 0.1
# The key in a finding's data, after a crash or a hang, of the end of what the process printed.
ENDED_BADLY = "log"


@dataclass(frozen=True, kw_only=True)
class Child:
    """A process that runs a part of a check.

    Attributes:
        name: The part's name.
        command: The command, which appends findings to `to`.
        to: The file of findings.
        needs_s: The part is not started with less time left.
        limit_s: The part is stopped after this time.
        alone: Nothing else runs at the same time, because the part measures time.
        environment: Variables that are added to the environment.
    """

    name: str
    command: Sequence[str]
    to: Path
    needs_s: float = 20.0
    limit_s: float = 180.0
    alone: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        """Returns the file of what the process prints."""
        return self.to.with_suffix(".log")


@dataclass
class _Running:
    child: Child
    process: subprocess.Popen[bytes]
    began: float
    num_bytes: int = 0  # bytes of the findings that were read
    num_found: int = 0


def run_all(
    children: Sequence[Child],
    *,
    deadline: float,
    jobs: int,
    done: Callable[[Child, list[Finding]], None],
    on_finding: Callable[[Child, Finding], None] = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Runs children in their order, up to `jobs` at once.

    A child that did not end well has one more finding, which says so.

    Args:
        children: The processes to run.
        deadline: The time of `clock` when all are stopped.
        jobs: The most processes at once.
        done: Called with all findings of a child when it has ended.
        on_finding: Called with each finding as soon as its child has written it.
        clock: Returns the time.
    """
    waiting = list(children)
    running: list[_Running] = []
    try:
        while waiting or running:
            for each in list(running):
                ending = _ending(each, deadline, clock())
                for finding in ending or []:
                    append(each.child.to, finding)
                for finding in _news(each):
                    on_finding(each.child, finding)
                if ending is not None:
                    running.remove(each)
                    done(each.child, read(each.child.to))
            while waiting and _may_start(waiting[0], running, jobs):
                child = waiting.pop(0)
                left = deadline - clock()
                if left < child.needs_s:
                    text = f"{max(0, left):.0f} s were left, and it may need {child.needs_s:.0f}"
                    finding = Finding(child.name, LEFT_OUT, text)
                    on_finding(child, finding)
                    done(child, [finding])
                else:
                    running.append(_Running(child, _start(child), clock()))
            time.sleep(POLL_S)
    finally:
        for each in running:
            _stop(each.process)


def _may_start(child: Child, running: Sequence[_Running], jobs: int) -> bool:
    if child.alone or any(each.child.alone for each in running):
        return not running
    return len(running) < jobs


def _start(child: Child) -> subprocess.Popen[bytes]:
    with child.log.open("wb") as log:
        return subprocess.Popen(
            list(child.command),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **child.environment},
            start_new_session=True,  # so that it can be stopped with what it started
        )


def _ending(running: _Running, deadline: float, now: float) -> list[Finding] | None:
    """Returns None while the child runs, else findings about a bad end."""
    status = running.process.poll()
    name, elapsed = running.child.name, now - running.began
    if status is None:
        if now < deadline and elapsed < running.child.limit_s:
            return None
        _stop(running.process)
        if now >= deadline and elapsed < running.child.limit_s:
            return [Finding(name, LEFT_OUT, f"stopped after {elapsed:.0f} s: time is up")]
        return [
            Finding(
                name,
                FAILED,
                f"stopped after {elapsed:.0f} s: it hangs, or is far too slow",
                data=_tail(running.child),
            )
        ]
    _stop(running.process)  # a process that it started and left would keep the GPU busy
    if status == 0:
        return []
    how = f"exit status {status}" if status > 0 else signal.Signals(-status).name
    return [Finding(name, FAILED, f"its process ended with {how}", data=_tail(running.child))]


def _news(running: _Running) -> list[Finding]:
    """Returns the findings that the child has written since the last call."""
    num_bytes = running.child.to.stat().st_size if running.child.to.exists() else 0
    if num_bytes == running.num_bytes:
        return []
    written = read(running.child.to)
    news = written[running.num_found :]
    running.num_bytes, running.num_found = num_bytes, len(written)
    return news


def _tail(child: Child) -> dict[str, str]:
    return {ENDED_BADLY: child.log.read_text(encoding="utf-8", errors="replace")[-4000:]}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a child and its process group, which may outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
