"""Holds the engine of a server that runs, between two steps or from step to step, so that a test
chooses when what happens.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from jaxpage.engine.engine import Engine
from tests.support.running import WAIT_SECONDS, Running, wait_until


@contextlib.contextmanager
def held(server: Running) -> Iterator[None]:
    """Holds the engine between two steps.

    What is sent meanwhile waits in the queue of the engine's thread.
    """
    is_held, goes_on = threading.Event(), threading.Event()

    def hold(engine: Engine) -> None:
        is_held.set()
        goes_on.wait()

    holding = server.loop.call(hold)
    assert is_held.wait(WAIT_SECONDS)
    try:
        yield
    finally:
        goes_on.set()
        holding.result(WAIT_SECONDS)


class Steps:
    """Lets an engine take as many steps as it is allowed to."""

    def __init__(self, engine: Engine) -> None:
        self._step = engine.step
        self._allowed = threading.Semaphore(0)
        self.num_taken = 0

    def __call__(self) -> Any:
        self._allowed.acquire()
        groups = self._step()
        self.num_taken += 1
        return groups

    def allow(self, number: int) -> None:
        """Lets so many steps be taken, and waits for them."""
        expected = self.num_taken + number
        if number:
            self._allowed.release(number)
        wait_until(lambda: self.num_taken == expected, f"{number} steps")

    def let_go(self) -> None:
        """Ends the waiting for a step that nobody allows."""
        self._allowed.release(1 << 20)


@contextlib.contextmanager
def stepped(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    """Lets the engine take a step when it may."""
    steps = Steps(server.loop.engine)
    with monkeypatch.context() as patch:
        patch.setattr(server.loop.engine, "step", steps)
        try:
            yield steps
        finally:
            steps.let_go()
