"""Whether a drafter on the device follows the text, and how far it drafts ahead: it must, in the step before its drafts are wanted."""

from __future__ import annotations

from collections.abc import Iterable

from jaxpage.scheduling.plan import Row, StepPlan
from jaxpage.scheduling.policy import StepLimits
from jaxpage.speculation.controller import Controller
from jaxpage.speculation.costs import AheadCosts
from jaxpage.speculative_config import MOST_DRAFTS

KEEPS = 24  # steps for which it goes on following after drafts were last wanted or looked at: they may be wanted again
PATIENCE = 80  # steps for which it follows at most until they are looked at
MOST_LOST = (
    16.0  # steps' worth of time that may go into following for nothing, or for less than it takes, before it rests
)
SHARE = 0.01  # of the time that may go there: it rests for as long as that takes


class Following:
    """A drafter that has not computed all tokens of a sequence guesses badly: it is not asked about that one again, unless it begins anew.

    Without a controller it always follows, and drafts as far ahead as the shapes allow.
    """

    def __init__(
        self,
        limits: StepLimits,
        controller: Controller | None,
        *,
        block_size: int,
        most_levels: int = MOST_DRAFTS,
        remembers: bool = True,
    ) -> None:
        """
        Args:
            block_size: slots.
            most_levels: tokens ahead that it can draft.
            remembers: it has keys and values of its own, and must follow; else it is heads of the model, which guess when they are asked.
        """
        if controller is not None:
            controller.costs.ahead = AheadCosts(most_levels, each_level=remembers)
        self._limits = limits
        self._controller = controller
        self._remembers = remembers
        self._levels: int | None = None  # of the last step
        self._block_size = block_size
        self._seen: set[int] = set()  # sequences that have not ended
        self._blind: set[int] = set()  # those with tokens that the drafter has not computed
        self._blank: set[int] = set()  # blocks with such tokens, which others may find in the prefix cache
        self._has_drafted = False
        self._ready: frozenset[int] = frozenset()
        self._idle = 0  # steps since drafts were wanted, or since it began to follow
        self._patience = PATIENCE  # as many as that may be
        self._num_looks = 0  # of the controller, when it began
        self._lost = 0.0  # seconds, since it began
        self._rest = 0  # steps for which it is yet to rest

    def levels(self, plan: StepPlan, others_wait: bool = False) -> int | None:
        """How many tokens ahead of the step's draws it drafts; None: it has no part in the step.

        Args:
            others_wait: there are requests that could run and do not yet: where prompts and decoding mix, theirs come next behind prompts,
                and nothing is verified.
        """
        self._levels = self._choose(plan, others_wait and self._limits.mixed and not _decodes(plan))
        return self.last_levels

    @property
    def last_levels(self) -> int | None:
        """The same of the last step."""
        return self._levels if self._remembers or self._levels else None

    def _choose(self, plan: StepPlan, for_nothing: bool) -> int | None:
        most = self._limits.most_drafts(len(plan.rows))
        controller = self._controller
        if for_nothing or not plan.samples:
            most = 0
        if controller is None:
            return most
        if len({sample.row for sample in plan.samples}) < len(plan.rows):
            most = 0  # a prompt is not done: the next step goes on with it, and has no room for drafts
        if not self._remembers:
            return min(controller.levels_ahead, most)
        if self._rest:
            self._rest -= self._rest > 1 or any(row.sequence_id not in self._seen for row in plan.rows)  # a new request
            if self._rest:
                return None
            self._idle, self._patience, self._num_looks, self._lost = 0, PATIENCE, controller.num_looks, 0.0
        if controller.drafts:
            self._idle, self._patience = 0, KEEPS
        elif controller.num_looks > self._num_looks:
            self._patience = min(self._patience, self._idle + KEEPS)
        self._idle += 1
        lost = self._lost / controller.costs.of(self._limits.shape(len(plan.rows), 0))
        if self._idle > self._patience or lost > MOST_LOST:
            self._rest = max(1, round(lost / SHARE))  # one step at least: a rest ends only where a new request comes
            return None
        return min(controller.levels_ahead, most)

    def paid(self, plan: StepPlan, num_tokens: int) -> None:
        """The last step gave so many tokens: what it cost is weighed against what they would have cost without a drafter.

        The following of prompts is a part of it: it may be more than drafts gain with the few tokens behind them.
        """
        if self._controller is None or self._levels is None or not self._remembers:
            return
        costs, num_rows = self._controller.costs, len(plan.rows)
        if _decodes(plan):
            shape, plain = (self._limits.shape(num_rows, count) for count in (plan.num_tokens - num_rows, 0))
            lost = costs.of(shape, self._levels) - costs.of(plain) * num_tokens / num_rows
        else:
            lost = costs.of_following(plan.num_tokens)
        self._lost = max(0.0, self._lost + lost)

    def ran(self, plan: StepPlan, drafted: bool = True) -> None:
        """The step for which `levels` was asked has happened. drafted: its shape is one that drafts."""
        for row in plan.rows:
            self._note(row)
            if row.sequence_id in self._blind and (plan.swap_in or plan.copies):
                self._blank.update(row.block_table)
        forks = [(sample.sequence_id, plan.rows[sample.row].sequence_id) for sample in plan.samples]
        self._seen.update(child for child, _ in forks)
        self._blind |= {child for child, parent in forks if parent in self._blind}
        self._has_drafted = bool(self._levels) and drafted
        self._ready = frozenset(child for child, _ in forks if child not in self._blind and self._has_drafted)

    def _note(self, row: Row) -> None:
        """What is known of a sequence and of the blocks in which the row's tokens stand."""
        first, rest = divmod(row.start, self._block_size)
        written = row.block_table[first:]
        is_new = row.sequence_id not in self._seen
        self._seen.add(row.sequence_id)
        if self._levels is None:
            self._blind.add(row.sequence_id)
            self._blank.update(written)
            return
        if row.start == 0:
            self._blind.discard(row.sequence_id)
        elif is_new and not self._blank.isdisjoint(row.block_table[: first + (rest > 0)]):
            self._blind.add(row.sequence_id)
        self._blank.difference_update(written[rest > 0 :])

    @property
    def has_drafted(self) -> bool:
        """In the last step."""
        return self._has_drafted

    @property
    def ready(self) -> frozenset[int]:
        """The sequences that it drafted for in the last step."""
        return self._ready

    def has_lost(self, sequence_id: int) -> bool:
        return sequence_id in self._blind

    def forget(self, sequence_ids: Iterable[int]) -> None:
        gone = set(sequence_ids)
        self._blind -= gone
        self._seen -= gone


def _decodes(plan: StepPlan) -> bool:
    """No prompts: every token is drawn behind."""
    return len(plan.samples) == plan.num_tokens
