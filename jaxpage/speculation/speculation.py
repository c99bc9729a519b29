"""Drafts for the sequences that decode, as many as are worth it, and what came of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from jaxpage.decoding.edits import Append, Edit
from jaxpage.request import Request, Sequence, SequenceGroup
from jaxpage.scheduling.plan import StepPlan, StepResult
from jaxpage.scheduling.policy import StepLimits
from jaxpage.speculation.controller import Controller
from jaxpage.speculation.proposal import Draft, Observer, Proposer

logger = logging.getLogger(__name__)


class Speculation:
    """Asks a proposer, and a controller how many drafts a step is worth; without a controller as many as the shapes allow."""

    def __init__(
        self, proposer: Proposer, limits: StepLimits, controller: Controller | None, *, vocab_size: int
    ) -> None:
        """vocab_size: of the model. What a proposer drafts beyond it is dropped."""
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._failed = False
        self._limits = limits
        self._controller = controller

    def propose(self, groups: Iterable[SequenceGroup]) -> dict[int, Draft]:
        """Drafts for the running groups' sequences that have one token left to compute, by sequence id. Beams are not drafted for:
        which of them goes on behind a token is not known before it is drawn."""
        groups = tuple(groups)
        num_rows = sum(len(group.unfinished) for group in groups)
        most = self._limits.most_drafts(num_rows)
        drafts: dict[int, Draft] = {}
        if not most:
            return drafts
        for group in groups:
            if group.request.beam or group.children_due:
                continue
            for sequence in group.unfinished:
                if sequence.num_pending_tokens == 1:
                    draft = self._draft(group.request, sequence, most)
                    if draft is not None and draft.token_ids:
                        drafts[sequence.sequence_id] = draft
        if self._controller is not None:
            lengths = [(sequence_id, len(draft.token_ids)) for sequence_id, draft in drafts.items()]
            num_drafts = self._controller.choose(num_rows, lengths, most)
            drafts = {sequence_id: draft.cut(num_drafts) for sequence_id, draft in drafts.items() if num_drafts}
        return drafts

    def _draft(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """As much of the proposer's draft as can be verified. No step fails because of a proposer: one that fails is not asked again."""
        if self._failed:
            return None
        try:
            draft = self._proposer.propose(request, sequence, num_drafts)
            return None if draft is None else draft.sound(self._vocab_size, num_drafts)
        except Exception:
            self._give_up()
            return None

    def _give_up(self) -> None:
        logger.exception("the proposer failed: from now on nothing is drafted, and texts stay what they are")
        self._failed = True

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """A step ran: what the model's heads guess behind its draws, if there are heads, is the proposer's."""
        if result.guesses is None or self._failed or not isinstance(self._proposer, Observer):
            return
        last = range(len(plan.samples)) if result.paths is None else result.paths.max(axis=1).tolist()
        try:
            for index, guesses_JW in zip(last, result.guesses, strict=True):
                sample = plan.samples[index]
                self._proposer.observe(sample.sequence_id, sample.position + 1, guesses_JW)
        except Exception:
            self._give_up()

    def verified(self, plan: StepPlan, edits: Iterable[Edit], seconds: float) -> None:
        """A step happened, with drafts or without."""
        if self._controller is None:
            return
        right: dict[int, int] = {}
        for edit in edits:
            if isinstance(edit, Append):
                right[edit.sequence_id] = right.get(edit.sequence_id, 0) + edit.drafted
        for row in plan.rows:
            if row.parents:
                self._controller.verified(row.sequence_id, len(row.parents), right.get(row.sequence_id, 0))
        if all(len(row.token_ids) == 1 + len(row.parents) for row in plan.rows):
            self._controller.measured(len(plan.rows), max(len(row.parents) for row in plan.rows), seconds)

    def forget(self, group: SequenceGroup) -> None:
        """The request has ended."""
        if not self._failed:
            try:
                self._proposer.forget(group)
            except Exception:
                self._give_up()
        if self._controller is not None:
            self._controller.forget(group.sequence_ids)
