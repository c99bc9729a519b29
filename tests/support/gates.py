"""An engine that takes a step when a test says so."""

from __future__ import annotations

import asyncio
import threading


class Gate:
    """Stands before the steps of an engine, and lets so many through."""

    def __init__(self, monkeypatch, engine):
        self.permits, self.entered, self.num_steps = (
            threading.Semaphore(0),
            threading.Semaphore(0),
            0,
        )
        self._step = engine.step
        monkeypatch.setattr(engine, "step", self.step)

    def step(self):
        self.entered.release()
        self.permits.acquire()
        self.num_steps += 1
        return self._step()

    def open(self):
        self.permits.release(10_000)

    async def reached(self):
        """The engine stands before a step."""
        await asyncio.to_thread(self.entered.acquire)

    async def until(self, awaitable):
        """Steps while something is waited for."""
        task = asyncio.ensure_future(awaitable)
        while not task.done():
            self.permits.release()
            await asyncio.wait([task], timeout=0.01)
        return task.result()
