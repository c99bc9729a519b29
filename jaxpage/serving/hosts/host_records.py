"""Makes the records that hosts compare: those of an event log, with a few further facts."""

from __future__ import annotations

from jaxpage.replay import Record, Recorder
from jaxpage.step.plan import StepPlan
from jaxpage.step.request import SequenceGroup


class HostRecorder(Recorder):
    """A recorder for rank 0 and for its followers, whose records must be equal."""

    def _beside_arrival(self, group: SequenceGroup) -> Record:
        """Returns the name and the digest of the request's adapter, if it has one."""
        return {} if group.request.lora is None else {"lora": list(group.request.lora)}

    def _beside_plan(self, plan: StepPlan) -> Record:
        """Returns how many tokens a drafter on the devices drafts ahead, if there is one.

        A step without it has another executable, and all hosts must run the same one.
        """
        return {} if plan.draft_depth is None else {"draft_depth": plan.draft_depth}
