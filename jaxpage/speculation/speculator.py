"""Drafts for the sequences that decode, as much as is worth it, and learns what came of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from jaxpage.speculation.controller import Controller
from jaxpage.speculation.drafter_sync import DrafterSync
from jaxpage.speculation.proposal import Proposer
from jaxpage.step.draft import NO_DRAFTS, Draft, Drafts
from jaxpage.step.edits import Append, Edit
from jaxpage.step.limits import StepLimits
from jaxpage.step.plan import Row, StepPlan
from jaxpage.step.report import StepReport
from jaxpage.step.request import Request, Sequence, SequenceGroup
from jaxpage.step.strategy import Strategy

logger = logging.getLogger(__name__)


class Speculator(Protocol):
    """Gives an engine its drafts, and learns what came of its steps."""

    def propose(self, running: Iterable[SequenceGroup]) -> Drafts:
        """Returns drafts for sequences of the running groups.

        They can be verified in any step, and need not be.
        """
        ...

    def draft_depth(self, plan: StepPlan, others_wait: bool) -> int | None:
        """Returns `StepPlan.draft_depth` for a plan.

        `others_wait` says that there are requests that could run and do not yet.
        """
        ...

    def observe(self, report: StepReport) -> None:
        """Learns from the step for which drafts were asked last."""
        ...

    def forget(self, group: SequenceGroup) -> None:
        """Forgets a request that has ended."""
        ...


class NoSpeculation:
    """Drafts nothing."""

    def propose(self, running: Iterable[SequenceGroup]) -> Drafts:
        """Returns no drafts."""
        return NO_DRAFTS

    def draft_depth(self, plan: StepPlan, others_wait: bool) -> int | None:
        """Returns None: there is no device drafter."""
        return None

    def observe(self, report: StepReport) -> None:
        """Does nothing: there is nothing to learn."""

    def forget(self, group: SequenceGroup) -> None:
        """Does nothing: there is nothing to forget."""


class ProposingSpeculator:
    """Asks a controller how many drafts a step is worth, and a proposer for so many.

    Without a controller it asks for as many as the shapes allow.
    """

    def __init__(
        self,
        proposer: Proposer,
        limits: StepLimits,
        controller: Controller | None,
        *,
        vocab_size: int,
        strategies: Mapping[int, Strategy] | None = None,
        sync: DrafterSync | None = None,
        always_drafts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins with a proposer that has not failed.

        Args:
            proposer: The method of speculation.
            limits: The shapes of steps.
            controller: The controller, or None.
            vocab_size: V of the model. Drafts with other tokens are cut.
            strategies: The strategies of the requests, by sequence id: they say what their grammars
                admit. None if there are no grammars.
            sync: The switch of a device drafter, which has to draft before it is asked.
            always_drafts: The drafter on the device needs no switch, and drafts in every step.
            clock: Returns the time in seconds.
        """
        self.proposer = proposer
        self.controller = controller
        self._limits = limits
        self._vocab_size = vocab_size
        self._strategies = strategies
        self._sync = sync
        self._always_drafts = always_drafts
        self._clock = clock
        self.has_failed = False
        self._proposed = 0.0  # the time when drafts were last proposed
        # The drafts of this step that a grammar does not wholly admit, and how many of their tokens
        # it admits, by sequence id.
        self._refused: dict[int, tuple[Draft, int]] = {}

    def propose(self, running: Iterable[SequenceGroup]) -> Drafts:
        """Returns drafts for sequences that have one token left to compute; see `Speculator`.

        Beam search gets none, because the surviving beams are known only after all beams have
        drawn.
        """
        began = self._proposed = self._clock()
        self._refused = {}
        # This begins a step of the controller, so it is called even where nothing is drafted.
        skips = self.controller is not None and self.controller.skips()
        if skips or self.has_failed or (self._sync is not None and self._sync.is_off):
            return NO_DRAFTS
        proposed = self._drafts(running)
        drafts = proposed if self._strategies is None else filter_drafts(proposed, self._strategies)
        for sequence_id, draft in proposed.items():
            num_left = len(drafts[sequence_id].token_ids) if sequence_id in drafts else 0
            if num_left < len(draft.token_ids):
                self._refused[sequence_id] = draft, num_left
        self._proposed = self._clock()
        return Drafts(drafts, self._proposed - began)

    def _drafts(self, groups: Iterable[SequenceGroup]) -> dict[int, Draft]:
        num_rows = 0
        # The sequences that can be drafted for, by id.
        decoding: dict[int, tuple[Request, Sequence]] = {}
        for group in groups:
            for sequence in group.unfinished:
                num_rows += 1
                # The step computes a prompt, and has no room for drafts.
                if sequence.num_pending_tokens > 1:
                    return {}
                if not (group.request.beam or group.pending_forks) and self._can_draft(
                    group.request, sequence
                ):
                    decoding[sequence.sequence_id] = group.request, sequence
        drafts: dict[int, Draft] = {}
        for sequence_id, num_drafts in self._ask(num_rows, decoding).items():
            draft = self._draft(*decoding[sequence_id], num_drafts)
            if draft is not None and draft.token_ids:
                drafts[sequence_id] = draft
        if self.controller is None:
            return drafts
        counts = self.controller.cut(num_rows, drafts)
        return {
            sequence_id: drafts[sequence_id].cut(count) for sequence_id, count in counts.items()
        }

    def _can_draft(self, request: Request, sequence: Sequence) -> bool:
        """Returns whether a sequence can have drafts.

        There are none for its last token: nothing could follow it, and a probe would show nothing.
        """
        has_room = sequence.num_known_tokens + 1 < request.max_total_tokens
        return has_room and (self._sync is None or not self._sync.is_stale(sequence.sequence_id))

    def _ask(self, num_rows: int, sequence_ids: Iterable[int]) -> Mapping[int, int]:
        """Returns how many drafts to ask for, by sequence id."""
        if self.controller is not None:
            return self.controller.ask(
                num_rows, list(sequence_ids), None if self._sync is None else self._sync.ready
            )
        maximum = min(
            self._limits.max_drafts(num_rows),
            self._limits.draft_budget(num_rows) // max(1, num_rows),
        )
        return dict.fromkeys(sequence_ids, maximum) if maximum else {}

    def _draft(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """Returns as much of the proposer's draft as can be verified.

        No step fails because of a proposer: one that fails is not asked again.
        """
        if self.has_failed:
            return None
        try:
            draft = self.proposer.propose(request, sequence, num_drafts)
            return None if draft is None else self._sound(sequence, draft, num_drafts)
        except Exception:
            self._give_up()
            return None

    def _sound(self, sequence: Sequence, draft: Draft, num_drafts: int) -> Draft | None:
        try:
            draft = draft.sound(self._vocab_size, num_drafts)
        except ValueError:  # other sequences are not affected
            logger.exception("nothing is drafted for sequence %d", sequence.sequence_id)
            return None
        return draft if self._limits.trees else draft.first_branch()

    def _give_up(self) -> None:
        logger.exception("the proposer failed: from now on nothing is drafted")
        self.has_failed = True

    def draft_depth(self, plan: StepPlan, others_wait: bool) -> int | None:
        """Returns `StepPlan.draft_depth` for a plan; see `Speculator`."""
        if self._sync is None:
            return 1 if self._always_drafts else None
        return self._sync.depth(plan, others_wait)

    def observe(self, report: StepReport) -> None:
        """Tells the proposer, the controller and the switch of the drafter what came of a step."""
        if not self.has_failed:
            try:
                self.proposer.observe(report.plan, report.result)
            except Exception:
                self._give_up()
        plan = report.plan
        seconds = self._clock() - self._proposed
        num_tokens = sum(isinstance(edit, Append) for edit in report.edits)
        if self.controller is not None:
            if plan.verifies or self._refused:
                self._learn(self.controller, plan, report.edits)
            # The time of moving blocks or of computing prompts says nothing of the shapes that
            # decode.
            if plan.decodes and not (plan.swap_in or plan.swap_out):
                num_rows = len(plan.rows)
                context = sum(row.start for row in plan.rows)
                self.controller.costs.context = context / num_rows
                asking = report.drafts.seconds
                num_drafts = plan.num_tokens - num_rows
                self.controller.learn_time(
                    num_rows, num_drafts, num_tokens, seconds, asking, plan.draft_depth
                )
        if self._sync is not None:
            self._sync.ran(plan, num_tokens, report.result.draft_candidates is not None)

    def _learn(self, controller: Controller, plan: StepPlan, edits: Iterable[Edit]) -> None:
        """Tells the controller which drafts were right."""
        appended: dict[int, list[int]] = {}
        for edit in edits:
            # The token after them may be one of the wrong drafts, if the rule is not "coupled".
            if isinstance(edit, Append) and edit.drafted:
                appended.setdefault(edit.sequence_id, []).append(edit.token_id)
        verified = {
            row.sequence_id: Draft(row.token_ids[1:], _parents(row))
            for row in plan.rows
            if row.parents
        }
        for sequence_id, (draft, num_left) in self._refused.items():
            # What a grammar refused is known to be wrong only where all drafts before it were
            # verified.
            if num_left == (len(verified[sequence_id].token_ids) if sequence_id in verified else 0):
                verified[sequence_id] = draft
        for sequence_id, draft in verified.items():
            path = _right(draft, appended.get(sequence_id, []))
            controller.learn_verified(sequence_id, draft.parents, path)

    def forget(self, group: SequenceGroup) -> None:
        """Forgets a request that has ended."""
        if not self.has_failed:
            try:
                self.proposer.forget(group)
            except Exception:
                self._give_up()
        if self.controller is not None:
            self.controller.acceptance.forget(group.sequence_ids)
        if self._sync is not None:
            self._sync.forget(group.sequence_ids)


def filter_drafts(
    drafts: Mapping[int, Draft], strategies: Mapping[int, Strategy]
) -> dict[int, Draft]:
    """Returns the drafts without those that a grammar does not admit and what follows them.

    Drafts are by sequence id. One that a grammar does not admit is wrong for certain, and one that
    ends the sequence saves no step: the draw before it gives the same token. A mask after a draft
    is needed anyway if the draft is verified, and grammars keep it, so that asking costs no more
    than not asking.

    Drafts with a `q` stay: what they were drawn from includes what no grammar admits, and the rule
    that looks at it rejects those.
    """
    filtered = {
        each: _admit(each, draft, strategies[each])
        for each, draft in drafts.items()
        if each in strategies
    }
    return {sequence_id: draft for sequence_id, draft in filtered.items() if draft.token_ids}


def _admit(sequence_id: int, draft: Draft, strategy: Strategy) -> Draft:
    places = {-1: -1}  # the places of those that stay, by their places before
    try:
        if draft.q is not None or strategy.mask(sequence_id) is None:
            return draft  # the usual case
        for index, parent in enumerate(draft.parents):
            if parent in places and strategy.mask(sequence_id, draft.path(index)) is not None:
                places[index] = len(places) - 1
    except Exception:  # other requests are not affected
        logger.exception("nothing is drafted for sequence %d", sequence_id)
        return Draft((), ())
    admitted = [place for place in places if place >= 0]
    return Draft(
        tuple(draft.token_ids[p] for p in admitted),
        tuple(places[draft.parents[p]] for p in admitted),
    )


def _parents(row: Row) -> tuple[int, ...]:
    """Returns `Draft.parents` of a row's drafts."""
    return tuple(parent - 1 for parent in row.parents)


def _right(draft: Draft, token_ids: Iterable[int]) -> set[int]:
    """Returns the places of the drafts that are tokens of the sequence now."""
    path: set[int] = set()
    last = -1
    for token_id in token_ids:
        for index, parent in enumerate(draft.parents):
            if parent == last and draft.token_ids[index] == token_id:
                path.add(index)
                last = index
                break
        else:
            break
    return path
