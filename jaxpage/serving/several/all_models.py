"""Drives the models of a server together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from jaxpage.errors import JaxpageError
from jaxpage.serving.several.served_model import ServedModel
from jaxpage.serving.several.table import ModelTable


class Models:
    """Drives the models of a table together: the part of a driver that `Serving` needs.

    Attributes:
        ended: Ends when the models were stopped.
    """

    def __init__(self, table: ModelTable[ServedModel]) -> None:
        self._table = table
        self.termination: Future[None] = Future()
        # A running future cannot be cancelled, so nobody who awaits it ends it for the others.
        self.termination.set_running_or_notify_cancel()

    def start(self) -> None:
        """Begins to load models that are asked for."""
        self._table.start()

    async def stats(self) -> Mapping[str, Any]:
        """Raises JaxpageError, since models come and go; `/metrics` has the metrics of each."""
        raise JaxpageError("the metrics of several models are at /metrics")

    async def wait_until_drained(self, timeout: float | None, subject: str = "The engine") -> bool:
        """Has all models accept no more requests; see `AsyncDriver.wait_until_drained`."""
        await self._table.stop()
        models = [slot.model for slot in self._table.slots.values() if slot.model is not None]
        drained = [
            model.driver.wait_until_drained(timeout, subject)
            for model in models
            if not model.is_over
        ]
        return all(await asyncio.gather(*drained))

    def stop(self, timeout: float | None = None) -> bool:
        """Ends all models; returns False if one is still in a step."""
        models = [slot.model for slot in self._table.slots.values() if slot.model is not None]
        # The list has each model stopped, where a generator would end at the first False.
        have_ended = all([model.stop(timeout) for model in models])
        if not self.termination.done():
            self.termination.set_result(None)
        return have_ended
