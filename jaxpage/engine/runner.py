"""Runs batches on the device. Owns the parameters and the pages; never sees a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxpage.device.executables import Executables
from jaxpage.device.kv_pages import KVPages
from jaxpage.device.steps import unpack_result
from jaxpage.engine.batch_builder import Batch
from jaxpage.scheduling.plan import StepResult


class Runner:
    """Steps from the table of executables. The pages are donated to each step and replaced by what it returns."""

    def __init__(self, parameters: Any, new_pages: Callable[[], KVPages], executables: Executables):
        self.executables = executables
        self._parameters = parameters
        self._new_pages = new_pages
        self._pages = new_pages()

    def run(self, batch: Batch) -> StepResult:
        for pairs in batch.copies:
            self._pages = self.executables.copy(self._pages, pairs)
        step = self.executables.step(batch.bucket)
        packed, self._pages = step(self._parameters, self._pages, batch.packed)
        return StepResult(*unpack_result(np.asarray(packed), batch.num_draws))

    @property
    def parameters(self) -> Any:
        """The weights as they are loaded: a nested dict of arrays."""
        return self._parameters

    @property
    def pages_are_lost(self) -> bool:
        """True after a step that failed or was interrupted between taking the pages and returning them."""
        return any(page.is_deleted() for page in jax.tree.leaves(self._pages))

    def rebuild_pages(self) -> None:
        """An empty pool; what sequences had in the old one is gone."""
        self._pages = ()
        self._pages = self._new_pages()

    def close(self) -> None:
        """Gives the device memory back."""
        for array in jax.tree.leaves((self._parameters, self._pages)):
            array.delete()
        self._parameters, self._pages = {}, ()
        self.executables.close()
