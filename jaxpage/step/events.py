"""Tells listeners what an engine does, in order.

A listener ignores the events, writes them to a log, or compares them with a log (replay).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpage.step.plan import StepPlan
from jaxpage.step.report import StepReport
from jaxpage.step.request import SequenceGroup
from jaxpage.step.update import WeightsUpdate


class Events:
    """Listens to an engine and ignores all events. Listeners override what they want to hear."""

    def arrived(self, group: SequenceGroup) -> None:
        """Reports that a request was admitted to the queue."""

    def aborted(self, group: SequenceGroup) -> None:
        """Reports that a request was aborted."""

    def pinned(self, group: SequenceGroup, pin_id: int) -> None:
        """Reports that a request was ended, and that its prompt stays in the cache."""

    def unpinned(self, pin_id: int) -> None:
        """Reports that a pin was released."""

    def planned(self, plan: StepPlan) -> None:
        """Reports that a step is about to run."""

    def stepped(self, report: StepReport) -> None:
        """Reports that a step ran and was committed."""

    def failed(self, plan: StepPlan, error: Exception) -> None:
        """Reports that a step raised an exception; the running requests are about to end."""

    def pages_rebuilt(self) -> None:
        """Reports that the pages are new: running requests start over, and nothing is cached."""

    def prefix_cache_reset(self) -> None:
        """Reports that no prefix that was computed before is in the cache."""

    def weights_replaced(self, update: WeightsUpdate) -> None:
        """Reports that the model has other weights; `prefix_cache_reset` follows."""

    def closed(self) -> None:
        """Reports that the engine is shut down; nothing follows."""


class Both(Events):
    """Tells each event to two listeners, one after the other."""

    def __init__(self, first: Events, second: Events) -> None:
        self._first = first
        self._second = second


def _report_both(event: str) -> Callable[..., None]:
    def report(listeners: Both, *details: Any) -> None:
        getattr(listeners._first, event)(*details)
        getattr(listeners._second, event)(*details)

    return report


# A new event cannot be forgotten here.
for _event in vars(Events):
    if not _event.startswith("_"):
        setattr(Both, _event, _report_both(_event))
