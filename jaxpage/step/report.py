"""Reports a step to the event log, the metrics and the speculator."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpage.step.draft import Drafts
from jaxpage.step.edits import Edit
from jaxpage.step.plan import StepPlan, StepResult
from jaxpage.step.request import SequenceGroup


@dataclass(frozen=True)
class StepReport:
    """A step that ran and was committed.

    Attributes:
        drafts: The drafts that were proposed; the plan has those that were verified.
        plan: The step.
        result: What the device drew.
        edits: The edits that were applied, in order.
        groups: The groups that the edits touched.
    """

    drafts: Drafts
    plan: StepPlan
    result: StepResult
    edits: list[Edit]
    groups: list[SequenceGroup]
