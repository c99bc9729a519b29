"""Makes executables on several threads: all at once, or each when it is waited for."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from tqdm import tqdm

from jaxpage.device.inputs.buckets import Bucket

# The calls that compile executables, by the keys of a table.
Jobs = dict[Bucket | str, functools.partial[Any]]


class Waiting:
    """Makes an executable once: on a thread in the background, or when it is used.

    Args:
        make: Loads or compiles the executable. It is let go then: it may hold weights or a file.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] | None = make
        self._making = threading.Lock()
        self._executable: Any = None

    def result(self) -> Any:
        """Returns the executable; the first thread that asks makes it, and others wait for it."""
        with self._making:
            if self._make is not None:
                self._executable, self._make = self._make(), None
            return self._executable


def begin(entries: Iterable[Any], num_threads: int | None = None) -> ThreadPoolExecutor:
    """Begins to make what is waited for among entries of a table, in this order.

    Args:
        entries: The entries; those that are made already stay.
        num_threads: The number of threads; None takes one for each core.

    Returns:
        The threads, which are to be shut down.
    """
    pool = ThreadPoolExecutor(num_threads or os.cpu_count() or 1, thread_name_prefix="executables")
    for entry in entries:
        if isinstance(entry, Waiting):
            pool.submit(entry.result)
    return pool


def run_all(jobs: Jobs, progress: bool) -> dict[Bucket | str, Any]:
    """Runs all jobs on a few threads.

    XLA compiles outside Python's lock, so threads help although tracing is serial.
    """
    table: dict[Bucket | str, Any] = {}
    with (
        ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool,
        tqdm(
            total=len(jobs), desc="Compiling", unit="shape", disable=None if progress else True
        ) as bar,
    ):
        futures = {pool.submit(job): key for key, job in jobs.items()}
        try:
            for future in as_completed(futures):
                table[futures[future]] = future.result()
                bar.set_postfix_str(str(futures[future]))
                bar.update()
        except BaseException:
            # Otherwise Ctrl-C would wait for all that is not compiled yet.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return table
