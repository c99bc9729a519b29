"""What the simulator wants of a scheduler: the engine's own with its block manager, or one of the systems before it."""

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
        """Slots that are swapped together."""

    @property
    def has_unfinished(self) -> bool: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def add(self, group: SequenceGroup) -> None:
        """Raises CapacityError if the group could never run."""

    def plan(self) -> StepPlan | None: ...

    def commit(self, plan: StepPlan, edits: Iterable[Edit]) -> list[SequenceGroup]:
        """Returns the groups that have something new, or are done."""

    def memory(self, rows: Sequence[Row]) -> MemorySplit:
        """What the slots hold between plan and commit. What the step computes counts as tokens: their slots are being written."""


class PagedScheduler(Scheduler):
    """The engine's scheduler with a look at its memory."""

    @property
    def block_size(self) -> int:
        return self.block_manager.block_size

    def memory(self, rows: Sequence[Row]) -> MemorySplit:
        running = [sequence for group in self.running for sequence in group.unfinished]
        computed = {sequence.sequence_id: sequence.num_computed_tokens for sequence in running}
        computed |= {row.sequence_id: row.context_length for row in rows}
        known = {sequence.sequence_id: sequence.num_known_tokens for sequence in running}
        return self.block_manager.usage(computed, known)
