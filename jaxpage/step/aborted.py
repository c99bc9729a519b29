"""Holds what an aborted request had, so that it can be continued."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from dataclasses import replace
from typing import NamedTuple

from jaxpage.outputs import TokenLogprobs
from jaxpage.step.request import Request, Sequence, SequenceGroup
from jaxpage.step.strategy import Draw, Strategy

ABORT = "abort"  # the finish reason of a sequence that goes on if its request is continued


class AbortedRequest(NamedTuple):
    """Holds what an aborted request had.

    Attributes:
        sequences: Its sequences, in the order of their sample index.
        prompt_logprobs: The log probabilities of its prompt, all of them or none.
        request: The request as it was admitted; None in a replay, which admits it again.
        strategy: Its strategy, which knows the place of each sequence in its text and its grammar.
            None has a new one follow the tokens.
    """

    sequences: list[Sequence]
    prompt_logprobs: list[TokenLogprobs]
    request: Request | None = None
    strategy: Strategy | None = None

    @classmethod
    def of(cls, group: SequenceGroup, strategy: Strategy) -> AbortedRequest:
        """Returns what a group had that was aborted just now."""
        sequences = group.sequences
        if not any(sequence.num_output_tokens for sequence in sequences):
            sequences = sequences[:1]  # the first draw forks the others
        # The whole prompt is scored again if a part of it was not, so no score comes twice.
        scores = [] if group.num_unscored else group.prompt_logprobs
        return cls(sequences, scores, group.request, strategy)

    def resume(self, request: Request, sequence_ids: TokenIds[int], version: int) -> SequenceGroup:
        """Returns a group that goes on with what there was; all its tokens are computed again.

        Args:
            request: The request.
            sequence_ids: The new ids of its sequences, by their sample index.
            version: The version of the weights that draw the next tokens.
        """
        sequences = [
            _copy(sequence, sequence_ids[sequence.sample_index]) for sequence in self.sequences
        ]
        group = SequenceGroup(request, sequences, child_ids=tuple(sequence_ids[1:]))
        group.prompt_logprobs += self.prompt_logprobs
        for sequence in group.unfinished:
            sequence.goes_on_with(version)
        return group

    def adopt(self, group: SequenceGroup, strategy: Strategy) -> Strategy:
        """Returns the strategy of a group that `resume` has returned.

        Args:
            group: The group.
            strategy: A new strategy.
        """
        if self.strategy is not None:
            pairs = zip(self.sequences, group.sequences, strict=True)
            # A strategy knows its sequences by their ids, and these are new.
            self.strategy.renumber({old.sequence_id: new.sequence_id for old, new in pairs})
            return self.strategy
        for sequence in group.unfinished:
            for token_id in sequence.output_token_ids:
                strategy.advance([Draw(sequence.sequence_id, token_id)])
        return strategy


def begin_group(
    request: Request,
    sequence_ids: tuple[int, ...],
    version: int,
    aborted: AbortedRequest | None,
) -> SequenceGroup:
    """Returns the group of a request that is new, or goes on with what it had.

    Args:
        request: The request.
        sequence_ids: The ids that its sequences may have.
        version: The version of the weights that draw its next tokens.
        aborted: What it had; None for a new request.
    """
    if aborted is not None:
        return aborted.resume(request, sequence_ids, version)
    sequence = Sequence(
        sequence_id=sequence_ids[0],
        sample_index=0,
        num_prompt_tokens=len(request.prompt_token_ids),
        token_ids=list(request.prompt_token_ids),
        embedded=request.embedded,
        weights=[(0, version)],
    )
    if request.beam:
        return SequenceGroup(request, [sequence], reserved_ids=sequence_ids)
    return SequenceGroup(request, [sequence], child_ids=sequence_ids[1:])


def _copy(sequence: Sequence, sequence_id: int) -> Sequence:
    """Returns a copy of a sequence that goes on if it was aborted; nothing of it is computed."""
    goes_on = sequence.finish_reason == ABORT
    return replace(
        sequence,
        sequence_id=sequence_id,
        token_ids=sequence.token_ids.copy(),
        num_computed_tokens=0,
        block_digests=[],
        text_ends=sequence.text_ends.copy(),
        logprobs=sequence.logprobs.copy(),
        # All its tokens are computed again, and bring their routes with them.
        routes=[] if goes_on else sequence.routes,
        finish_reason=None if goes_on else sequence.finish_reason,
        weights=sequence.weights.copy(),
    )
