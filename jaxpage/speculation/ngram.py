"""Drafts by prompt lookup: what followed the last tokens at an earlier place of the sequence.

The method is that of Saxena 2023, and vLLM's `ngram`. Nothing is indexed. Each step compares the
whole sequence with its last tokens: for a few thousand tokens that takes microseconds, it needs no
more memory than the tokens themselves, and steps that do not ask cost nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jaxpage.speculation.proposal import Proposer
from jaxpage.step.draft import Draft, chain
from jaxpage.step.request import Request, Sequence, SequenceGroup

TokenIds = npt.NDArray[np.int32]  # [C]


class NGramProposer(Proposer):
    """Drafts chains.

    The longest match wins. Of several it is the latest, which docs/lab-log.md found better than the
    first.
    """

    def __init__(self, min_length: int, max_length: int) -> None:
        """Takes the lengths of the n-grams that are looked up, 1 <= shortest <= longest."""
        self._min_length = min_length
        self._max_length = max_length
        self._known: dict[int, _Known] = {}  # by sequence id

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """Drafts what followed the longest match."""
        known = self._known.get(sequence.sequence_id)
        if known is None:
            known = self._known[sequence.sequence_id] = _Known()
        token_ids = known.grow(sequence.token_ids)
        start = find(token_ids, self._min_length, self._max_length)
        return (
            None if start is None else chain(tuple(token_ids[start : start + num_drafts].tolist()))
        )

    def forget(self, group: SequenceGroup) -> None:
        """Forgets the sequences of a request that has ended."""
        for sequence_id in group.sequence_ids:
            self._known.pop(sequence_id, None)


class _Known:
    """Holds the tokens of a sequence, in an array with room to grow."""

    def __init__(self) -> None:
        self._array: TokenIds = np.empty(0, np.int32)
        self._count = 0

    def grow(self, token_ids: list[int]) -> TokenIds:
        """Returns all tokens; `token_ids` are those of the last call, and more."""
        count = self._count
        self._count = len(token_ids)
        if self._count > len(self._array):
            array: TokenIds = np.empty(2 * self._count, np.int32)
            array[:count] = self._array[:count]
            self._array = array
        self._array[count : self._count] = token_ids[count:]
        return self._array[: self._count]


def find(token_ids: TokenIds, min_length: int, max_length: int) -> int | None:
    """Returns the place after the longest earlier occurrence of the last tokens.

    It compares at most `max_length` tokens; of several occurrences it takes the latest. Occurrences
    may overlap the end that they are compared with. The result is None where not even the last
    `min_length` tokens occurred before.
    """
    last = len(token_ids) - 1
    # The places where the last `length` tokens ended before.
    ends = (token_ids[:last] == token_ids[last]).nonzero()[0]
    if not len(ends):
        return None
    latest = int(ends[-1])
    if latest + 1 >= max_length and np.array_equal(
        token_ids[latest + 1 - max_length : latest + 1], token_ids[last + 1 - max_length :]
    ):
        return latest + 1  # a text that goes in circles ends here
    for length in range(1, max_length):
        # A longer match could only be at the same place.
        if length >= min_length and len(ends) == 1:
            break
        longer = ends[ends.searchsorted(length) :]
        longer = longer[token_ids[longer - length] == token_ids[last - length]]
        if not len(longer):
            if length < min_length:
                return None
            break
        ends = longer
    return int(ends[-1]) + 1
