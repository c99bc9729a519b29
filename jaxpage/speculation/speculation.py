"""Drafts for the sequences that decode, as many as are worth it, and what came of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from jaxpage.decoding.edits import Append, Edit
from jaxpage.request import SequenceGroup
from jaxpage.scheduling.plan import StepPlan
from jaxpage.scheduling.policy import StepLimits
from jaxpage.speculation.controller import Controller
from jaxpage.speculation.proposal import Draft


class Proposer(Protocol):
    """Guesses what follows. A wrong guess costs time and changes no text."""

    def propose(self, sequence_id: int, token_ids: Sequence[int], num_drafts: int) -> Draft | None:
        """At most so many drafts behind the known tokens, which only ever grow. None: nothing comes to mind."""
        ...

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """These sequences are gone."""
        ...


class Speculation:
    """Asks a proposer, and a controller how many drafts a step is worth; without a controller as many as the shapes allow."""

    def __init__(self, proposer: Proposer, limits: StepLimits, controller: Controller | None) -> None:
        self._proposer = proposer
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
                    draft = self._proposer.propose(sequence.sequence_id, sequence.token_ids, most)
                    if draft is not None and draft.token_ids:
                        drafts[sequence.sequence_id] = draft
        if self._controller is not None:
            lengths = [(sequence_id, len(draft.token_ids)) for sequence_id, draft in drafts.items()]
            num_drafts = self._controller.choose(num_rows, lengths, most)
            drafts = {sequence_id: draft.cut(num_drafts) for sequence_id, draft in drafts.items() if num_drafts}
        return drafts

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

    def forget(self, sequence_ids: Iterable[int]) -> None:
        sequence_ids = tuple(sequence_ids)
        self._proposer.forget(sequence_ids)
        if self._controller is not None:
            self._controller.forget(sequence_ids)
