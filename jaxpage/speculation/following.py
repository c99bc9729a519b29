"""Whether a drafter on the device follows the text, and how far it drafts ahead: it must, in the step before its drafts are wanted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxpage.scheduling.plan import StepPlan
from jaxpage.scheduling.policy import StepLimits
from jaxpage.speculation.controller import Controller
from jaxpage.speculation.estimates import Shape

KEEPS = 24  # steps for which it goes on following although nobody wants drafts: they may be wanted again
RESTS = (
    15 * KEEPS
)  # steps for which it then does not, before it follows new requests again, so that the controller can look at them


@dataclass
class AheadCosts:
    """Seconds that a drafter takes in steps of each shape, measured at the start."""

    following: dict[Shape, float] = field(default_factory=dict)
    level: dict[Shape, float] = field(default_factory=dict)  # of each token ahead

    def add(self, shape: Shape, following: float, ahead: float, levels: int) -> None:
        """A step of this shape took so much longer with a drafter that follows, and with one that drafts so many tokens ahead."""
        self.following[shape] = max(0.0, following)
        self.level[shape] = max(0.0, ahead - following) / levels

    def of(self, shape: Shape, levels: int | None) -> float:
        if levels is None:
            return 0.0
        return self.following.get(shape, 0.0) + levels * self.level.get(shape, 0.0)


class Following:
    """A drafter that has not computed all tokens of a sequence guesses badly: it is not asked about that one again, unless it begins anew.

    Without a controller it always follows, and drafts as far ahead as the shapes allow.
    """

    def __init__(self, limits: StepLimits, controller: Controller | None) -> None:
        self.costs = AheadCosts()
        self._limits = limits
        self._controller = controller
        self._levels: int | None = None  # of the last step
        self._blind: set[int] = set()  # sequences with tokens that the drafter has not computed
        self._ready: frozenset[int] = frozenset()  # sequences that it drafted for in the last step
        self._idle = 0  # steps since drafts were wanted, or since it began to follow again

    def levels(self, plan: StepPlan) -> int | None:
        """How many tokens ahead of the step's draws it drafts; None: it does not follow."""
        self._levels = self._choose(plan)
        return self._levels

    def _choose(self, plan: StepPlan) -> int | None:
        num_rows = len(plan.rows)
        if self._controller is None:
            return self._limits.most_drafts(num_rows)
        self._idle = 0 if self._controller.drafts else self._idle + 1
        if self._idle > KEEPS:
            if self._idle <= KEEPS + RESTS or not any(row.start == 0 for row in plan.rows):
                return None
            self._idle = 1
        return min(self._controller.levels_ahead, self._limits.most_drafts(num_rows))

    def ran(self, plan: StepPlan) -> None:
        """The step for which `levels` was asked has happened."""
        for row in plan.rows:
            if self._levels is None:
                self._blind.add(row.sequence_id)
            elif row.start == 0:
                self._blind.discard(row.sequence_id)
        forks = [(s.sequence_id, plan.rows[s.row].sequence_id) for s in plan.samples]
        self._blind |= {child for child, parent in forks if parent in self._blind}
        self._ready = (
            frozenset(child for child, _ in forks if child not in self._blind) if self._levels else frozenset()
        )

    def is_ready(self, sequence_id: int) -> bool:
        return sequence_id in self._ready

    def seconds(self, shape: Shape) -> float:
        """That it took of the last step, which had this shape, by what was measured at the start."""
        return self.costs.of(shape, self._levels)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self._blind.difference_update(sequence_ids)
