"""Prompt lookup: what followed the last few tokens where they stood before in the same sequence (Saxena 2023; vLLM's `ngram`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxpage.speculation.proposal import Draft, chain


@dataclass
class _Index:
    """Where every n-gram of a sequence stood first: the place behind it."""

    num_tokens: int = 0  # that are indexed
    behind: dict[tuple[int, ...], int] = field(default_factory=dict)


class NGramProposer:
    """Drafts chains. The longest match wins; of several the first, behind which the most is known."""

    def __init__(self, shortest: int, longest: int) -> None:
        """Lengths of the n-grams that are looked up, 1 <= shortest <= longest."""
        self._lengths = range(longest, shortest - 1, -1)
        self._indices: dict[int, _Index] = {}  # by sequence id

    def propose(self, sequence_id: int, token_ids: Sequence[int], num_drafts: int) -> Draft | None:
        """What may follow. `token_ids` are those of the last call for this sequence, and more."""
        index = self._indices.setdefault(sequence_id, _Index())
        self._extend(index, token_ids)
        for length in self._lengths:
            place = index.behind.get(tuple(token_ids[-length:])) if length <= len(token_ids) else None
            if place is not None:
                return chain(tuple(token_ids[place : place + num_drafts]))
        return None

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._indices.pop(sequence_id, None)

    def _extend(self, index: _Index, token_ids: Sequence[int]) -> None:
        """Takes in the n-grams that another token follows."""
        for stop in range(max(1, index.num_tokens), len(token_ids)):
            for length in self._lengths:
                if length <= stop:
                    index.behind.setdefault(tuple(token_ids[stop - length : stop]), stop)
        index.num_tokens = len(token_ids)
