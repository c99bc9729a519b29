"""Chooses how many decode steps one executable runs, where their number adapts."""

from __future__ import annotations

from jaxpage.scheduling.plan_builder import PlanBuilder
from jaxpage.scheduling.running_set import RunningSet
from jaxpage.step.limits import StepLimits

# The steps between two arrivals for each decode step that one executable runs, where their number
# adapts. A request that comes in the middle waits for all of them, up to 60 ms on a GPU, and what
# was computed after the end of a text is dropped. With this bound the wait is at most a sixteenth
# of the time since the last arrival, also where requests come at a steady rate, and so is the loss
# of a request alone, while the host's part falls to an eighth. Steps are counted, not seconds: a
# plan depends on events alone, which a replay repeats.
STEPS_FOR_ONE_MORE = 16


class SeveralSteps:
    """Counts the steps since the last arrival, where each decode step of an executable counts."""

    def __init__(self, limits: StepLimits) -> None:
        """Begins to count.

        Args:
            limits: The limits of steps.
        """
        self._limits = limits
        self._num_quiet_steps = 0

    def note_arrival(self) -> None:
        """Notes that a request has come."""
        self._num_quiet_steps = 0

    def count_step(self, step: PlanBuilder) -> None:
        """Counts a step that was planned."""
        lengths = [len(draft.token_ids) for draft in step.drafts.values()]
        self._num_quiet_steps += 1 + max(lengths, default=0)

    def choose(self, step: PlanBuilder, requests: RunningSet) -> int:
        """Returns how many decode steps the executable of a step may run.

        Where that adapts, it is one while anybody waits for the end of a step: a request in the
        queue, one that was preempted or swapped out, or one whose prompt is not computed yet.
        """
        maximum = self._limits.num_steps
        if not self._limits.adapts_num_steps:
            return maximum
        if requests.num_waiting or step.preempted or step.num_admitted:
            return 1
        if len({id(group) for group, _, _ in step.work}) < requests.num_running:
            return 1  # the prompts of the others are computed in the next step
        return min(maximum, self._num_quiet_steps // STEPS_FOR_ONE_MORE)
