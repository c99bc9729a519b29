"""Whether a drafter on the device follows the text, and how far it drafts ahead: it must, in the step before its drafts are wanted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxpage.shapes import MOST_DRAFTS
from jaxpage.speculation.controller import MOST_NAP, Controller
from jaxpage.speculation.costs import AheadCosts
from jaxpage.step.limits import StepLimits
from jaxpage.step.plan import Row, StepPlan

KEEPS = 24  # steps for which it goes on following after drafts were last wanted or looked at: they may be wanted again
PATIENCE = 80  # steps for which it follows at most until they are looked at
MOST_LOST = 8.0  # steps' worth of time that may be lost by following before it rests
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
        self._lost = 0.0  # since it began, in steps without drafts; below 0 it has gained
        self._plain = 0.0  # seconds that the last of those would have taken
        self._pace = _Pace()
        self._rest = 0  # steps for which it is yet to rest
        self._last_decoded = True  # the last step did, and computed no prompts

    def levels(self, plan: StepPlan, others_wait: bool = False) -> int | None:
        """How many tokens ahead of the step's draws it drafts; None: it has no part in the step.

        Args:
            others_wait: there are requests that could run and do not yet.
        """
        self._levels = self._choose(plan, others_wait)
        self._note(plan)
        return self.last_levels

    @property
    def last_levels(self) -> int | None:
        """The same of the last step."""
        return self._levels if self._remembers or self._levels else None

    def _choose(self, plan: StepPlan, others_wait: bool) -> int | None:
        controller = self._controller
        if controller is not None and self._remembers and not self._follows(plan, controller):
            return None
        most = 0 if self._is_for_nothing(plan, others_wait) else self._limits.most_drafts(len(plan.rows))
        return most if controller is None else min(controller.levels_ahead, most)

    def _is_for_nothing(self, plan: StepPlan, others_wait: bool) -> bool:
        """Whether the next step verifies no drafts, or those of few of its sequences."""
        if plan.decodes:  # where the two kinds alternate others come next, if any could be admitted the last time
            return others_wait and not self._limits.mixed and not self._last_decoded
        if len({sample.row for sample in plan.samples}) < len(plan.rows):
            return True  # a prompt is not done: the next step goes on with it, and has no room for drafts
        if self._limits.mixed:
            return others_wait  # their prompts come next
        others = self._seen.difference([row.sequence_id for row in plan.rows])
        return self._controller is not None and len(plan.rows) < len(others)  # most of those that decode next

    def _follows(self, plan: StepPlan, controller: Controller) -> bool:
        """Whether a drafter with keys and values of its own has a part in the step, for what it costs."""
        if self._rest:
            self._rest -= self._rest > 1 or any(row.sequence_id not in self._seen for row in plan.rows)  # a new request
            if self._rest:
                return False
            self._idle, self._patience, self._num_looks, self._lost = 0, PATIENCE, controller.num_looks, 0.0
        if controller.drafts:
            self._idle, self._patience = 0, KEEPS
        elif controller.num_looks > self._num_looks:
            self._patience = min(self._patience, self._idle + KEEPS)
        self._idle += 1
        if not plan.decodes:  # others join: what was gained until now is none of theirs
            self._lost = max(0.0, self._lost)
        if self._idle > self._patience or self._lost > MOST_LOST:
            # One step at least: a rest ends only where a new request comes.
            self._rest = max(1, round(self._lost / SHARE))
            return False
        return True

    def paid(self, plan: StepPlan, num_tokens: int) -> None:
        """The last step gave so many tokens: what it cost is weighed against what they would have cost without a drafter.

        The following of prompts is a part of it: it may be more than drafts gain with the few tokens behind them.
        """
        if self._controller is None or self._levels is None or not self._remembers:
            return
        costs, num_rows = self._controller.costs, len(plan.rows)
        alone = self._limits.shape(num_rows, 0)
        if plan.decodes:
            num_without = self._pace.num_rows_without_drafts(plan.rows, num_tokens)
            self._plain = costs.of(self._limits.shape(num_without, 0))
            shape = self._limits.shape(num_rows, plan.num_tokens - num_rows)
            lost = costs.of(shape, self._levels) - self._plain * num_tokens / num_without
        else:
            lost = costs.of_following(plan.num_tokens) + costs.of(alone, self._levels) - costs.of(alone, 0)
        self._lost += lost / (self._plain or costs.of(alone))

    def ran(self, plan: StepPlan, drafted: bool = True) -> None:
        """The step for which `levels` was asked has happened. drafted: its shape is one that drafts."""
        self._has_drafted = bool(self._levels) and drafted
        drawn = (sample.sequence_id for sample in plan.samples) if self._has_drafted else ()
        self._ready = frozenset(drawn) - self._blind

    def _note(self, plan: StepPlan) -> None:
        """What will be known of the step's sequences, and of the blocks in which its tokens stand.

        If the step fails, the pages are lost and nobody finds those blocks. Before it all of the plan is in the processor's caches.
        """
        self._last_decoded = plan.decodes
        if self._levels is None:  # as in most steps: a few sets at once
            size, sequence_ids = self._block_size, [row.sequence_id for row in plan.rows]
            self._seen.update(sequence_ids)
            self._blind.update(sequence_ids)
            self._blank.update(*[row.block_table[row.start // size :] for row in plan.rows])
        else:
            self._note_followed(plan.rows)
        if plan.swap_in or plan.copies:
            self._blank.update(*[row.block_table for row in plan.rows if row.sequence_id in self._blind])
        if not plan.decodes:
            forks = [(sample.sequence_id, plan.rows[sample.row].sequence_id) for sample in plan.samples]
            self._seen.update(child for child, _ in forks)
            self._blind.update(child for child, parent in forks if parent in self._blind)

    def _note_followed(self, rows: Iterable[Row]) -> None:
        for row in rows:
            first, rest = divmod(row.start, self._block_size)
            is_new = row.sequence_id not in self._seen
            self._seen.add(row.sequence_id)
            if row.start == 0:
                self._blind.discard(row.sequence_id)
            elif is_new and not self._blank.isdisjoint(row.block_table[: first + (rest > 0)]):
                self._blind.add(row.sequence_id)
            self._blank.difference_update(row.block_table[first + (rest > 0) :])

    @property
    def nap(self) -> int:
        """For how many steps the controller need not be asked."""
        if self._controller is None or self.last_levels is not None:
            return 0
        return MOST_NAP if self._remembers else self._controller.nap

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


class _Pace:
    """How far sequences have come since the last of them joined.

    With drafts those that joined together end one by one; without any they would end together. So the few rows that are left in the end
    are dear, and what their drafts gain is not what all drafts have gained.
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # where each sequence was
        self._come: dict[int, float] = {}  # how many tokens it has had since, about

    def num_rows_without_drafts(self, rows: Sequence[Row], num_tokens: int) -> int:
        """Notes a step that gave so many tokens. Returns its rows, and the sequences that have ended and were ahead of them."""
        if any([row.sequence_id not in self._first for row in rows]):
            self._first, self._come = {row.sequence_id: row.start for row in rows}, {}
        now = {row.sequence_id: row.start - self._first[row.sequence_id] for row in rows}
        mean = sum(now.values()) / len(now)
        num_ended = sum([come > mean for sequence_id, come in self._come.items() if sequence_id not in now])
        self._come.update({sequence_id: come + num_tokens / len(now) for sequence_id, come in now.items()})
        return len(now) + num_ended
