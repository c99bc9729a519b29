"""Implements greedy decoding and sampling: each draw is the next token of its sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpage.decoding.mask_budget import MaskBudget, Unlimited
from jaxpage.decoding.stopping import Detokenizer, Stopping
from jaxpage.decoding.thinking import ReasoningPlace, follow, may_force, start
from jaxpage.shapes import NOTHING_ALLOWED
from jaxpage.step.edits import Append, Edit, Finish
from jaxpage.step.request import Request
from jaxpage.step.strategy import Draw, refusal
from jaxpage.step.thinking import ThinkingBudget
from jaxpage.step.token_masks import Mask, mask_of

if TYPE_CHECKING:
    from jaxpage.decoding.constraints import Constraint, Grammar

_TOO_SLOW = (
    "following the grammar takes too long for the number of sequences of the request; lower n, or "
    "use a simpler grammar"
)


class SamplingStrategy:
    """Decodes one request by greedy decoding or sampling.

    It keeps, for each sequence, how much of the text is out and, if the request has a grammar or a
    budget for reasoning, the place in each of them.
    """

    def __init__(
        self,
        request: Request,
        new_detokenizer: Callable[[], Detokenizer],
        grammar: Grammar | None = None,
        budget: MaskBudget | None = None,
    ) -> None:
        """Starts without sequences; each sequence is added when it first draws.

        Args:
            request: The request.
            new_detokenizer: Makes the detokenizer of a sequence.
            grammar: The request's compiled grammar, if it has one.
            budget: The time budget of the engine's steps; None for no limit. A request whose
                grammar uses more than its share ends with an error.
        """
        self._request = request
        self._new_detokenizer = new_detokenizer
        self._stopping_of: dict[int, Stopping] = {}  # by sequence id
        self.grammar = grammar
        self._budget = budget or Unlimited()
        self._beginning: Constraint | None = None  # made once; each sequence starts with a copy
        self._constraint_of: dict[int, Constraint] = {}  # by sequence id
        self._place_of: dict[int, ReasoningPlace] = {}  # in the reasoning, by sequence id

    def advance(self, draws: Sequence[Draw]) -> list[Edit]:
        """Returns the edits that the draws of the request's sequences lead to."""
        edits: list[Edit] = []
        ended: set[int] = set()
        seen: set[int] = set()
        for draw in draws:
            if draw.sequence_id in ended:
                continue  # an accepted draft has ended the sequence
            if draw.sequence_id not in seen and self._is_too_slow():
                edits.append(self._too_slow(draw.sequence_id))  # replaces all draws of the sequence
            else:
                edits += self._advance(draw) if draw.token_id >= 0 else [self._last(draw)]
            seen.add(draw.sequence_id)
            if isinstance(edits[-1], Finish):
                ended.add(draw.sequence_id)
                for of_sequence in self._by_id:
                    of_sequence.pop(draw.sequence_id, None)
        return edits

    def mask(self, sequence_id: int, drafts: tuple[int, ...] = ()) -> Mask | None:
        """Returns the tokens that may come after these drafts, or None for no mask.

        The grammar and the budget for reasoning hold together. Where the grammar does not admit the
        end of the reasoning, it holds alone.
        """
        admitted = self._mask_of_grammar(sequence_id, drafts)
        forced = self._mask_of_budget(sequence_id, drafts)
        if forced is None or (self.grammar is not None and admitted is None):
            return admitted
        if admitted is None:
            return forced
        combined = admitted & forced
        return combined if combined.any() else admitted

    def renumber(self, sequence_ids: Mapping[int, int]) -> None:
        """Gives the sequences new ids, by the old ones; see `Strategy`."""
        for of_sequence in self._by_id:
            states = {sequence_ids[old]: state for old, state in of_sequence.items()}
            of_sequence.clear()
            of_sequence.update(states)

    def _mask_of_grammar(self, sequence_id: int, drafts: tuple[int, ...]) -> Mask | None:
        """Returns the tokens that the grammar admits after these drafts, or None for no mask."""
        if self.grammar is None:
            return None
        if drafts and self._is_too_slow():
            return self.grammar.mask_of(())  # the sequence draws no token, which ends it
        with self._spending():
            constraint = self._constraint(sequence_id)
            return None if constraint is None else constraint.mask_after(drafts)

    def _mask_of_budget(self, sequence_id: int, drafts: tuple[int, ...]) -> Mask | None:
        """Returns the one token with which the reasoning must end after these drafts, or None."""
        budget = self._request.thinking
        if budget is None:
            return None
        place = self._place(budget, sequence_id)
        if not may_force(budget, place, len(drafts)):
            return None
        for token_id in drafts:
            place = follow(budget, place, token_id)
        return mask_of(place.forced[:1], budget.vocab_size) if place.forced else None

    def _place(self, budget: ThinkingBudget, sequence_id: int) -> ReasoningPlace:
        place = self._place_of.get(sequence_id)
        return start(budget) if place is None else place

    def _constraint(self, sequence_id: int) -> Constraint | None:
        """Returns the sequence's constraint, which starts at the beginning of the grammar.

        This holds for a sequence that was forked off the prompt, too.
        """
        if self.grammar is not None and sequence_id not in self._constraint_of:
            if self._beginning is None:
                self._beginning = self.grammar.new_constraint(self._request)
            self._constraint_of[sequence_id] = self._beginning.copy()
        return self._constraint_of.get(sequence_id)

    def _spending(self) -> contextlib.AbstractContextManager[None]:
        return self._budget.spending(self._request.request_id)

    def _is_too_slow(self) -> bool:
        if self.grammar is None:
            return False
        return self._budget.is_spent(self._request.request_id, self._request.num_sequence_ids)

    def _too_slow(self, sequence_id: int) -> Finish:
        return Finish(sequence_id, "error", f"structured_outputs: {_TOO_SLOW}")

    def _advance(self, draw: Draw) -> list[Edit]:
        """Returns the edits of one drawn token: it is appended, and may end the sequence."""
        sequence_id = draw.sequence_id
        token_id = draw.token_id
        stopping = self._stopping(sequence_id)
        constraint = self._constraint(sequence_id)
        if constraint is None:
            verdict = stopping.push(token_id)
        else:
            with self._spending():
                end = constraint.advance(token_id)
            verdict = stopping.push(token_id, end)
        if (budget := self._request.thinking) is not None:
            self._place_of[sequence_id] = follow(budget, self._place(budget, sequence_id), token_id)
        append = Append(sequence_id, token_id, verdict.text, draw.logprobs, draw.drafted)
        if verdict.reason is None:
            return [append]
        return [append, Finish(sequence_id, verdict.reason, verdict.stop_reason, verdict.last_text)]

    @property
    def _by_id(self) -> tuple[dict[int, Any], ...]:
        """Returns all that is kept of sequences."""
        return self._stopping_of, self._constraint_of, self._place_of

    def _last(self, draw: Draw) -> Finish:
        """Returns the end of a sequence that drew no token.

        If its grammar may end there, this is an ordinary stop, else an error.
        """
        constraint = self._constraint_of.get(draw.sequence_id)
        if draw.token_id != NOTHING_ALLOWED or constraint is None or not constraint.may_stop:
            return refusal(draw)
        # The verdict has the text that was held back.
        verdict = self._stopping(draw.sequence_id).end("", "stop", None)
        return Finish(
            draw.sequence_id, verdict.reason or "stop", verdict.stop_reason, verdict.last_text
        )

    def _stopping(self, sequence_id: int) -> Stopping:
        if sequence_id not in self._stopping_of:
            self._stopping_of[sequence_id] = Stopping(self._request, self._new_detokenizer())
        return self._stopping_of[sequence_id]
