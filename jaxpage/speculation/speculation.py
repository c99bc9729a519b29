"""Drafts for the sequences that decode, as many as are worth it, and what came of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

from jaxpage.speculation.controller import Controller
from jaxpage.speculation.following import Following
from jaxpage.speculation.proposal import DrawObserver, LikeliestObserver, Observer, Proposer
from jaxpage.step.draft import Draft
from jaxpage.step.edits import Append, Edit
from jaxpage.step.limits import StepLimits
from jaxpage.step.plan import Row, StepPlan, StepResult
from jaxpage.step.request import Request, Sequence, SequenceGroup

logger = logging.getLogger(__name__)


class Speculation:
    """Asks a controller how many drafts a step is worth, and a proposer for so many; without a controller as many as the shapes allow."""

    def __init__(
        self,
        proposer: Proposer,
        limits: StepLimits,
        controller: Controller | None,
        *,
        vocab_size: int,
        following: Following | None = None,
    ) -> None:
        """
        Args:
            vocab_size: of the model. What a proposer drafts beyond it is dropped.
            following: of a drafter on the device, which has to draft before it is asked.
        """
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._failed = False
        self._limits = limits
        self.controller = controller
        self._following = following
        self._nap = 0  # steps for which the controller is yet not to be asked
        self._num_slept = 0  # steps for which it was not
        # Of this step's drafts, those that a grammar does not admit whole, and how many of their tokens it does. By sequence id.
        self._refused: dict[int, tuple[Draft, int]] = {}
        self._draw_observer = proposer if isinstance(proposer, DrawObserver) else None
        self._recycler = proposer if isinstance(proposer, LikeliestObserver) else None

    def propose(self, groups: Iterable[SequenceGroup]) -> Mapping[int, Draft]:
        """Drafts for the running groups' sequences that have one token left to compute, by sequence id. Beams are not drafted for:
        which of them goes on behind a token is not known before it is drawn."""
        if self._nap:
            self._nap -= 1
            self._num_slept += 1
            return {}
        awoke = self._num_slept > 0
        if awoke and self.controller is not None:
            self.controller.slept(self._num_slept)
        self._num_slept, self._refused = 0, {}
        return {} if self._failed else self._drafts(groups, awoke)

    @property
    def has_part(self) -> bool:
        """In the step for which drafts were asked last. Else nothing needs to be told of it, which saves the host some microseconds."""
        return not self._failed and (not self._num_slept or self._following is not None)

    def _drafts(self, groups: Iterable[SequenceGroup], awoke: bool) -> dict[int, Draft]:
        """awoke: from a nap."""
        num_rows = 0
        decoding: dict[int, tuple[Request, Sequence]] = {}  # by sequence id, of those that can be drafted for
        for group in groups:
            for sequence in group.unfinished:
                num_rows += 1
                if sequence.num_pending_tokens > 1:  # the step computes a prompt, and has no room for drafts
                    if self.controller is not None:
                        self.controller.pass_over()
                    return {}
                if not (group.request.beam or group.children_due) and self._can_draft(sequence.sequence_id):
                    decoding[sequence.sequence_id] = group.request, sequence
        if awoke and not num_rows:  # else, where all requests take as long, each nap may end between two
            if self.controller is not None:
                self.controller.pass_over()
            return {}
        asked = self._ask(num_rows, decoding)
        if not asked:
            if self.controller is not None:
                self._nap = self.controller.nap if self._following is None else self._following.nap
            return {}
        drafts: dict[int, Draft] = {}
        for sequence_id, num_drafts in asked.items():
            draft = self._draft(*decoding[sequence_id], num_drafts)
            if draft is not None and draft.token_ids:
                drafts[sequence_id] = draft
        if self.controller is None:
            return drafts
        counts = self.controller.cut(num_rows, drafts)
        return {sequence_id: drafts[sequence_id].cut(count) for sequence_id, count in counts.items()}

    def admitted(self, proposed: Mapping[int, Draft], left: Mapping[int, Draft]) -> None:
        """What is left of what `propose` gave for the step. What is missing cannot follow: it counts as wrong, unverified."""
        for sequence_id, draft in proposed.items():
            num_left = len(left[sequence_id].token_ids) if sequence_id in left else 0
            if num_left < len(draft.token_ids):
                self._refused[sequence_id] = draft, num_left

    def _can_draft(self, sequence_id: int) -> bool:
        return self._following is None or not self._following.has_lost(sequence_id)

    def _ask(self, num_rows: int, sequence_ids: Iterable[int]) -> dict[int, int]:
        """How many drafts to ask for, by sequence id."""
        if self.controller is not None:
            ready = None if self._following is None else self._following.ready
            return dict(self.controller.ask(num_rows, list(sequence_ids), ready))
        most = min(self._limits.most_drafts(num_rows), self._limits.draft_budget(num_rows) // max(1, num_rows))
        return dict.fromkeys(sequence_ids, most) if most else {}

    def _draft(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """As much of the proposer's draft as can be verified. No step fails because of a proposer: one that fails is not asked again."""
        if self._failed:
            return None
        try:
            draft = self._proposer.propose(request, sequence, num_drafts)
            return None if draft is None else self._sound(sequence, draft, num_drafts)
        except Exception:
            self._give_up()
            return None

    def _sound(self, sequence: Sequence, draft: Draft, num_drafts: int) -> Draft | None:
        try:
            draft = draft.sound(self._vocab_size, num_drafts)
        except ValueError:  # of one sequence: nobody else notices
            logger.exception("nothing is drafted for sequence %d", sequence.sequence_id)
            return None
        return draft if self._limits.trees else draft.first_branch()

    def _give_up(self) -> None:
        logger.exception("the proposer failed: from now on nothing is drafted")
        self._failed = True

    def levels(self, plan: StepPlan, others_wait: bool = False) -> int | None:
        """How many tokens ahead a drafter on the device drafts behind the step's draws. None: it does not follow, or is not there.
        Where tokens are recycled 1: the step is to tell what is likely behind its draws.

        others_wait: there are requests that could run and do not yet."""
        if self._following is None:
            return None if self._recycler is None else 1
        levels = self._following.levels(plan, others_wait)
        if self._following.last_levels is not None:
            self._nap = 0
        return levels

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """A step ran: the proposer hears what was drawn behind its drafts, and what heads of the model or a drafter guess behind that."""
        if self._following is not None:
            self._following.ran(plan, result.guesses is not None)
        if self._failed:
            return
        try:
            has_drafted = self._following is not None and self._following.has_drafted
            if has_drafted and result.guesses is not None and isinstance(self._proposer, Observer):
                last = range(len(plan.samples)) if result.paths is None else result.paths.max(axis=1).tolist()
                for index, guesses in zip(last, result.guesses, strict=True):
                    sample = plan.samples[index]
                    self._proposer.observe(sample.sequence_id, sample.position + 1, guesses)
            if self._draw_observer is not None and plan.verifies:
                for row, draws in _drawn(plan, result):
                    draft = Draft(row.token_ids[1:], _behind(row))
                    self._draw_observer.drawn(row.sequence_id, row.start + 1, draft, draws)
            if self._recycler is not None and result.likeliest is not None:
                token_ids = [plan.rows[sample.row].token_ids[sample.offset] for sample in plan.samples]
                salts = [sample.params.cache_salt for sample in plan.samples]
                self._recycler.heard(salts, token_ids, result.likeliest)
        except Exception:
            self._give_up()

    def verified(self, plan: StepPlan, edits: Iterable[Edit], seconds: float, proposing: float) -> None:
        """A step happened, with drafts or without. Seconds of `propose`, and of all else that the step took."""
        if self.controller is None or plan.swap_in or plan.swap_out:
            return  # nothing to learn, or a step that moved blocks: its seconds say nothing
        if self._num_slept and (self._following is None or self._following.last_levels is None):
            return
        num_appended = self._learn(self.controller, plan, edits) if plan.verifies or self._refused else 0
        if not plan.decodes:  # with prompts in it, whose seconds say nothing of shapes with drafts
            if self._following is not None:
                self._following.paid(plan, 0)
            return
        num_rows, levels = len(plan.rows), None
        num_tokens = num_appended or num_rows
        if self._following is not None:
            levels = self._following.last_levels
            self._following.paid(plan, num_tokens)
        self.controller.measured(num_rows, plan.num_tokens - num_rows, num_tokens, seconds, proposing, levels)

    def _learn(self, controller: Controller, plan: StepPlan, edits: Iterable[Edit]) -> int:
        """Which drafts were right. Returns how many tokens the sequences got."""
        appended: dict[int, list[int]] = {}
        num_appended = 0
        for edit in edits:
            if isinstance(edit, Append):
                num_appended += 1
                # What was drawn behind them may be one of the wrong drafts, if the rule is not coupled.
                if edit.drafted:
                    appended.setdefault(edit.sequence_id, []).append(edit.token_id)
        verified = {row.sequence_id: Draft(row.token_ids[1:], _behind(row)) for row in plan.rows if row.parents}
        for sequence_id, (draft, num_left) in self._refused.items():
            if num_left == (len(verified[sequence_id].token_ids) if sequence_id in verified else 0):
                verified[sequence_id] = draft
        for sequence_id, draft in verified.items():
            path = _right(draft, appended.get(sequence_id, []))
            controller.verified(sequence_id, draft.parents, path)
        return num_appended

    def forget(self, group: SequenceGroup) -> None:
        """The request has ended."""
        if not self._failed:
            try:
                self._proposer.forget(group)
            except Exception:
                self._give_up()
        if self.controller is not None:
            self.controller.forget(group.sequence_ids)
        if self._following is not None:
            self._following.forget(group.sequence_ids)


def _drawn(plan: StepPlan, result: StepResult) -> Iterator[tuple[Row, list[int]]]:
    """The rows with drafts, and what was drawn behind each of their tokens. A step that verifies draws behind every token."""
    draws, first = result.token_ids.tolist(), 0
    for row in plan.rows:
        stop = first + len(row.token_ids)
        if row.parents:
            yield row, draws[first:stop]
        first = stop


def _behind(row: Row) -> tuple[int, ...]:
    """`Draft.parents` of a row's drafts."""
    return tuple(parent - 1 for parent in row.parents)


def _right(draft: Draft, token_ids: Iterable[int]) -> set[int]:
    """Which of the drafts are the tokens that the sequence got of them."""
    path: set[int] = set()
    last = -1
    for token_id in token_ids:
        for place, parent in enumerate(draft.parents):
            if parent == last and draft.token_ids[place] == token_id:
                path.add(place)
                last = place
                break
        else:
            break
    return path
