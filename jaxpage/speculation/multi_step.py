"""Several decode steps in one executable: no drafts are made, the step itself draws the tokens that it goes on with."""

from __future__ import annotations

from collections.abc import Iterable

from jaxpage.speculation.speculator import NoSpeculation
from jaxpage.step.draft import NO_DRAFTS, PLACEHOLDER, Drafts, chain
from jaxpage.step.request import SequenceGroup


class MultiStep(NoSpeculation):
    """Places for the tokens that a step draws one after the other: they are planned, booked, logged and replayed as drafts are that are
    all right. So far `num_steps` is always tried; the scheduler plans fewer where blocks or the length of a sequence end before.

    The host sees none of these tokens before all are drawn. What needs it between two tokens (grammars, penalties, bad words, beams,
    min_tokens) takes one at a time, and with it all that decodes beside it.
    """

    def __init__(self, num_steps: int) -> None:
        self._places = chain((PLACEHOLDER,) * (num_steps - 1))

    def propose(self, running: Iterable[SequenceGroup]) -> Drafts:
        groups = list(running)
        if any(group.request.beam or group.request.processes_logits for group in groups):
            return NO_DRAFTS
        decoding = (sequence for group in groups for sequence in group.unfinished if sequence.num_pending_tokens == 1)
        return Drafts({sequence.sequence_id: self._places for sequence in decoding})
