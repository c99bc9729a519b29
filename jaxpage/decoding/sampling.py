"""The plain strategy: every draw is the next token of its sequence, until it stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxpage.decoding.constraints import Constraint, Grammar
from jaxpage.decoding.stopping import Detokenizer, Stopping
from jaxpage.shapes import NOTHING_ALLOWED
from jaxpage.step.edits import Append, Edit, Finish
from jaxpage.step.request import Request
from jaxpage.step.strategy import Draw, refusal
from jaxpage.step.token_masks import Mask


class SamplingStrategy:
    """Greedy decoding and sampling of one request. Keeps, for each of its sequences, how far its text has come, and its place in
    the request's grammar if there is one."""

    def __init__(
        self, request: Request, new_detokenizer: Callable[[], Detokenizer], grammar: Grammar | None = None
    ) -> None:
        self._request = request
        self._new_detokenizer = new_detokenizer
        self._stopping_of: dict[int, Stopping] = {}  # by sequence id
        self.grammar = grammar
        self._constraint_of: dict[int, Constraint] = {}  # by sequence id

    def advance(self, draws: Sequence[Draw]) -> list[Edit]:
        edits: list[Edit] = []
        ended: set[int] = set()
        for draw in draws:
            if draw.sequence_id in ended:
                continue  # behind a stop in a run of right drafts
            edits += self._advance(draw) if draw.token_id >= 0 else [self._last(draw)]
            if isinstance(edits[-1], Finish):
                ended.add(draw.sequence_id)
        return edits

    def mask(self, sequence_id: int, drafts: tuple[int, ...] = ()) -> Mask | None:
        constraint = self._constraint(sequence_id)
        return None if constraint is None else constraint.behind(drafts)

    def _constraint(self, sequence_id: int) -> Constraint | None:
        """A sequence begins at the start of the grammar, also one that is forked off a prompt."""
        if self.grammar is not None and sequence_id not in self._constraint_of:
            self._constraint_of[sequence_id] = Constraint(self.grammar, self._request)
        return self._constraint_of.get(sequence_id)

    def _advance(self, draw: Draw) -> list[Edit]:
        """The edits that one drawn token leads to: it is appended, and may end the sequence."""
        sequence_id, token_id = draw.sequence_id, draw.token_id
        stopping = self._stopping(sequence_id)
        constraint = self._constraint(sequence_id)
        verdict = stopping.push(token_id, constraint.advance(token_id) if constraint else None)
        append = Append(sequence_id, token_id, verdict.text, draw.logprobs, draw.drafted)
        if verdict.reason is None:
            return [append]
        del self._stopping_of[sequence_id]
        self._constraint_of.pop(sequence_id, None)
        return [append, Finish(sequence_id, verdict.reason, verdict.stop_reason, verdict.last_text)]

    def _last(self, draw: Draw) -> Finish:
        """The end of a sequence that drew no token. Where its grammar may end, that is what it does."""
        constraint = self._constraint_of.get(draw.sequence_id)
        if draw.token_id != NOTHING_ALLOWED or constraint is None or not constraint.may_stop:
            return refusal(draw)
        verdict = self._stopping(draw.sequence_id).end("", "stop", None)  # with the text that was held back
        return Finish(draw.sequence_id, verdict.reason or "stop", verdict.stop_reason, verdict.last_text)

    def _stopping(self, sequence_id: int) -> Stopping:
        if sequence_id not in self._stopping_of:
            self._stopping_of[sequence_id] = Stopping(self._request, self._new_detokenizer())
        return self._stopping_of[sequence_id]
