"""What rank 0 tells the other hosts of its engine: the records of an event log, and what these do not say."""

from __future__ import annotations

from jaxpage.replay.recorder import Record, Recorder
from jaxpage.step.plan import StepPlan
from jaxpage.step.request import SequenceGroup


class HostRecorder(Recorder):
    """Of both sides, so that they are compared."""

    def _beside_arrival(self, group: SequenceGroup) -> Record:
        """Name and digest of the adapter."""
        return {} if group.request.lora is None else {"lora": list(group.request.lora)}

    def _beside_plan(self, plan: StepPlan) -> Record:
        """All hosts run the same executable, which is another one where nothing is drafted on the devices."""
        return {} if plan.draft_depth is None else {"draft_depth": plan.draft_depth}
