"""Whether a drafter on the device follows the text, and how far it drafts ahead: it must, in the step before its drafts are wanted."""

from __future__ import annotations

from collections.abc import Iterable

from jaxpage.scheduling.plan import StepPlan
from jaxpage.scheduling.policy import StepLimits
from jaxpage.speculation.controller import Controller
from jaxpage.speculation.estimates import AheadCosts, Shape
from jaxpage.speculative_config import MOST_DRAFTS

KEEPS = 24  # steps for which it goes on following after drafts were last wanted or looked at: they may be wanted again
PATIENCE = 80  # steps for which it follows at most until they are looked at
RESTS = 12  # times as long as it has followed for nothing, it then rests


class Following:
    """A drafter that has not computed all tokens of a sequence guesses badly: it is not asked about that one again, unless it begins anew.

    Without a controller it always follows, and drafts as far ahead as the shapes allow.
    """

    def __init__(
        self,
        limits: StepLimits,
        controller: Controller | None,
        *,
        most_levels: int = MOST_DRAFTS,
        remembers: bool = True,
    ) -> None:
        """
        Args:
            most_levels: tokens ahead that it can draft.
            remembers: it has keys and values of its own, and must follow; else it is heads of the model, which guess when they are asked.
        """
        self.costs = AheadCosts(most_levels, each_level=remembers)
        if controller is not None:
            controller.ahead = self.costs
        self._limits = limits
        self._controller = controller
        self._remembers = remembers
        self._levels: int | None = None  # of the last step
        self._blind: set[int] = set()  # sequences with tokens that the drafter has not computed
        self._ready: frozenset[int] = frozenset()
        self._idle = 0  # steps since drafts were wanted, or since it began to follow
        self._patience = PATIENCE  # as many as that may be
        self._num_looks = 0  # of the controller, when it began
        self._rest = 0  # steps for which it is yet to rest

    def levels(self, plan: StepPlan) -> int | None:
        """How many tokens ahead of the step's draws it drafts; None: it does not follow."""
        self._levels = self._choose(plan)
        return self._levels

    def _choose(self, plan: StepPlan) -> int | None:
        most = self._limits.most_drafts(len(plan.rows))
        controller = self._controller
        if controller is None:
            return most
        if not self._remembers:
            return min(controller.levels_ahead, most)
        if self._rest:
            self._rest -= self._rest > 1 or any(row.start == 0 for row in plan.rows)  # it begins with a new request
            if self._rest:
                return None
            self._idle, self._patience, self._num_looks = 0, PATIENCE, controller.num_looks
        if controller.drafts:
            self._idle, self._patience = 0, KEEPS
        elif controller.num_looks > self._num_looks:
            self._patience = min(self._patience, self._idle + KEEPS)
        self._idle += 1
        if self._idle > self._patience:
            self._rest = RESTS * self._idle
            return None
        return min(controller.levels_ahead, most)

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

    @property
    def has_drafted(self) -> bool:
        """In the last step."""
        return bool(self._levels)

    @property
    def ready(self) -> frozenset[int]:
        """The sequences that it drafted for in the last step."""
        return self._ready

    def has_lost(self, sequence_id: int) -> bool:
        return sequence_id in self._blind

    def seconds(self, shape: Shape) -> float:
        """That it took of the last step, which had this shape, by what was measured at the start."""
        return self.costs.of(shape, self._levels)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self._blind.difference_update(sequence_ids)
