"""Defines what the simulator needs of a scheduler.

It is the engine's own scheduler with its block manager, or that of a system before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from jaxpage.memory import MemorySplit
from jaxpage.scheduling import Scheduler
from jaxpage.step.edits import Edit
from jaxpage.step.plan import Row, StepPlan
from jaxpage.step.request import SequenceGroup


class Policy(Protocol):
    """Plans steps and commits them, as `Scheduler` does."""

    @property
    def block_size(self) -> int:
        """Returns the number of slots that are swapped together."""

    @property
    def has_unfinished(self) -> bool:
        """Returns whether any request has not finished."""
        ...

    @property
    def num_running(self) -> int:
        """Returns the number of running requests."""
        ...

    @property
    def num_waiting(self) -> int:
        """Returns the number of waiting requests."""
        ...

    def add(self, group: SequenceGroup) -> None:
        """Adds a request.

        Raises:
            CapacityError: The group could never run.
        """

    def plan(self) -> StepPlan | None:
        """Returns the plan of the next step, or None if there is nothing to do."""
        ...

    def commit(self, plan: StepPlan, edits: Iterable[Edit]) -> list[SequenceGroup]:
        """Applies the edits of a step; returns the groups that have new tokens or are done."""

    def memory(self, rows: Sequence[Row]) -> MemorySplit:
        """Returns the split of the slots between plan and commit.

        The tokens that the step computes count as computed: their slots are being written.
        """


class PagedScheduler(Scheduler):
    """Adds a view of its memory to the engine's scheduler."""

    @property
    def block_size(self) -> int:
        """Returns the slots of a block."""
        return self.block_manager.block_size

    def memory(self, rows: Sequence[Row]) -> MemorySplit:
        """Returns the split of the slots between plan and commit."""
        running = [sequence for group in self.running for sequence in group.unfinished]
        computed = {sequence.sequence_id: sequence.num_computed_tokens for sequence in running}
        computed |= {row.sequence_id: row.context_length for row in rows}
        known = {sequence.sequence_id: sequence.num_known_tokens for sequence in running}
        return self.block_manager.usage(computed, known)
