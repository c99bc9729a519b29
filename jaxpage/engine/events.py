"""Events of an engine, in order. A listener ignores them, writes them to a log, or compares them with a log (replay)."""

from __future__ import annotations

from jaxpage.step.plan import StepPlan
from jaxpage.step.report import StepReport
from jaxpage.step.request import SequenceGroup


class Events:
    """The default listener: it ignores all events."""

    def arrived(self, group: SequenceGroup) -> None:
        """A request was admitted to the queue."""

    def aborted(self, group: SequenceGroup) -> None:
        """A request was ended from outside."""

    def pinned(self, group: SequenceGroup, pin_id: int) -> None:
        """A request was ended, and its prompt stays in place."""

    def unpinned(self, pin_id: int) -> None:
        """A pin was given up."""

    def planned(self, plan: StepPlan) -> None:
        """A step is about to run."""

    def stepped(self, report: StepReport) -> None:
        """A step ran and was committed."""

    def failed(self, plan: StepPlan, error: Exception) -> None:
        """A step raised; the running requests are about to end."""

    def pages_rebuilt(self) -> None:
        """The pages were made anew: what ran starts over, nothing is cached."""

    def prefix_cache_reset(self) -> None:
        """Nothing is found any more of what was computed before."""

    def closed(self) -> None:
        """The engine is shut down; nothing follows."""
