"""Defines a method of speculation: a proposer, which drafts and may learn from steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from jaxpage.step.draft import Draft
from jaxpage.step.plan import Row, StepPlan, StepResult
from jaxpage.step.request import Request, Sequence, SequenceGroup


class Proposer:
    """Drafts what follows.

    A wrong draft costs time. It changes no text with acceptance "coupled", and no distribution with
    "rejection". The time of a step shows whether drafts were right. So the drafts of a request must
    not come from another one, unless both have the same `cache_salt`.
    """

    num_together: int = 1  # drafts of a sequence that are asked for and verified all or not at all
    warm_up_steps: int = 1  # steps in a row after which drafts show what they are worth

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """Returns at most `num_drafts` drafts after the known tokens; None if it has none.

        The known tokens only ever grow. Not every step asks, so there may be many more than last
        time.
        """
        raise NotImplementedError

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learns from a step: what was drawn after drafts, and the candidates of a device drafter.

        The tokens of the step are in the sequences already.
        """

    def forget(self, group: SequenceGroup) -> None:
        """Forgets a request that has ended.

        Its sequences are as it left them; some of them may never have been asked for drafts.
        """


class DeviceProposer(Proposer):
    """Drafts from what a device drafter guessed with the last draw of each sequence.

    Candidates hold as long as no token is known beyond the one drawn in that step. So a sequence
    that was swapped out keeps them, one that is recomputed gets new ones, and a fork has those of
    the draw that it began with.
    """

    def __init__(self) -> None:
        # By sequence id: the number of known tokens, and the candidates.
        self._candidates: dict[int, tuple[int, npt.NDArray[np.int32]]] = {}

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Keeps the candidates of a step."""
        if not plan.draft_depth or result.draft_candidates is None:
            return
        # A draft has a larger index than the one that it continues, so this is the last of a path.
        last = (
            range(len(plan.samples)) if result.paths is None else result.paths.max(axis=1).tolist()
        )
        # After the last there may be padding.
        for index, candidates in zip(last, result.draft_candidates, strict=False):
            sample = plan.samples[index]
            self._candidates[sample.sequence_id] = sample.position + 1, candidates

    def candidates_after(self, sequence: Sequence) -> npt.NDArray[np.int32] | None:
        """Returns the candidates of a sequence, if they still hold."""
        num_known_tokens, candidates = self._candidates.get(sequence.sequence_id, (0, None))
        return candidates if num_known_tokens == len(sequence.token_ids) else None

    def forget(self, group: SequenceGroup) -> None:
        """Forgets the sequences of a request that has ended."""
        for sequence_id in group.sequence_ids:
            self._candidates.pop(sequence_id, None)


def iterate_verified_rows(plan: StepPlan, result: StepResult) -> Iterator[tuple[Row, list[int]]]:
    """Yields the rows with drafts, and what was drawn after each of their tokens.

    A step that verifies draws after every token.
    """
    if not plan.verifies:
        return
    draws = result.token_ids.tolist()
    first = 0
    for row in plan.rows:
        stop = first + len(row.token_ids)
        if row.parents:
            yield row, draws[first:stop]
        first = stop
