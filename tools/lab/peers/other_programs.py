"""Measures how much of the machine other programs use while a child process runs."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

STAT = Path("/proc/stat")
# The columns of time in which the cores, or the host of a virtual machine, do something: user,
# nice, system, irq, softirq and steal.
BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)


class OtherPrograms:
    """Measures the share of all cores that other programs have from its creation on.

    What this process and its children use does not count, once the children have ended. Where the
    system does not say it (it is no Linux), the share is unknown.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._others = _seconds_of_others()

    def share(self) -> float | None:
        """Returns the share, from 0 to 1, or None where it is unknown."""
        now = _seconds_of_others()
        if now is None or self._others is None:
            return None
        seconds = (time.perf_counter() - self._started) * (os.cpu_count() or 1)
        return max(0.0, now - self._others) / seconds


def _seconds_of_others() -> float | None:
    try:
        first = STAT.read_text().splitlines()[0].split()[1:]
    except OSError:
        return None
    busy = sum(int(first[column]) for column in BUSY_COLUMNS) / os.sysconf("SC_CLK_TCK")
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy - sum(use.ru_utime + use.ru_stime for use in uses)
