"""Runs independent jobs at the same time in processes, with the same results as one by one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")


class Pool(AbstractContextManager["Pool"]):
    """A pool of processes; with one, everything runs in this process.

    Each process is a fresh Python: nothing is forked.
    """

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self._executor = None
        if num_processes > 1:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(num_processes, mp_context=context)

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def map(self, function: Callable[..., T], jobs: Iterable[tuple[object, ...]]) -> list[T]:
        """Returns the results in the order of the jobs; each job is the arguments of one call."""
        if self._executor is None:
            return [function(*job) for job in jobs]
        return [
            future.result() for future in [self._executor.submit(function, *job) for job in jobs]
        ]
