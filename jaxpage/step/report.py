"""The report of a step, for the event log, the metrics and the speculator."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpage.step.draft import Drafts
from jaxpage.step.edits import Edit
from jaxpage.step.plan import StepPlan, StepResult
from jaxpage.step.request import SequenceGroup


@dataclass(frozen=True)
class StepReport:
    """A step that ran and was committed."""

    drafts: Drafts  # that were proposed for it; the plan has those that were verified
    plan: StepPlan
    result: StepResult
    edits: list[Edit]
    groups: list[SequenceGroup]  # that the edits touched
