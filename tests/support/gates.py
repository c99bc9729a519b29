"""An engine that takes a step when a test says so."""

from __future__ import annotations

import asyncio
import threading

from tests.support.running import wait_until


class Gate:
    """Stands before the steps of an engine, and lets so many through."""

    def __init__(self, monkeypatch, engine):
        self.permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.num_entered = self.num_steps = 0
        self._step = engine.step
        monkeypatch.setattr(engine, "step", self.step)

    def step(self):
        self.num_entered += 1
        self.entered.release()
        self.permits.acquire()
        self.num_steps += 1
        return self._step()

    def wait_before_step(self, number):
        """Waits until that step is about to begin; the first is step 1."""
        wait_until(lambda: self.num_entered >= number, f"step {number} is about to begin")

    def open(self):
        self.permits.release(10_000)

    async def reached(self):
        """Waits until the engine stands before a step."""
        await asyncio.to_thread(self.entered.acquire)

    async def until(self, awaitable):
        """Steps while something is waited for."""
        task = asyncio.ensure_future(awaitable)
        while not task.done():
            self.permits.release()
            await asyncio.wait([task], timeout=0.01)
        return task.result()
