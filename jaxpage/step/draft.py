"""Drafts: tokens that may follow a sequence, as a tree. A chain is a tree."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpage.shapes import MOST_CANDIDATES

# In place of a draft: a token that the step itself draws and goes on with (`StepLimits.num_steps`).
PLACEHOLDER = -1


class Candidates(NamedTuple):
    """Distributions that drafts were drawn from: the tokens that had a chance, with probabilities that sum to 1."""

    token_ids_NW: npt.NDArray[np.int32]  # at most MOST_CANDIDATES; padded with -1
    probabilities_NW: npt.NDArray[np.float32]  # padded with 0

    def of(self, places: list[int] | slice) -> Candidates:
        return Candidates(self.token_ids_NW[places], self.probabilities_NW[places])

    def as_lists(self) -> list[tuple[list[int], list[int]]]:
        """Of each draft ids and the float32 bits of their probabilities, up to the last that has a chance: for a log."""
        counts = [1 + int(np.flatnonzero(row)[-1]) for row in self.probabilities_NW]
        rows = zip(self.token_ids_NW, self.probabilities_NW.view(np.int32), counts, strict=True)
        return [(ids[:count].tolist(), bits[:count].tolist()) for ids, bits, count in rows]

    @classmethod
    def from_lists(cls, rows: list[tuple[list[int], list[int]]]) -> Candidates:
        """From a log. Raises OverflowError, TypeError or ValueError where that makes no sense."""
        width = max(len(ids) for ids, _ in rows)
        ids_NW, bits_NW = np.full((len(rows), width), -1, np.int32), np.zeros((len(rows), width), np.int32)
        for index, (ids, bits) in enumerate(rows):
            ids_NW[index, : len(ids)], bits_NW[index, : len(ids)] = ids, bits
        return cls(ids_NW, bits_NW.view(np.float32))

    def check(self, token_ids: tuple[int, ...], vocab_size: int) -> None:
        """Raises ValueError unless each of these tokens can come of its distribution, over the tokens of the model."""
        ids_NW, probabilities_NW = self.token_ids_NW[: len(token_ids)], self.probabilities_NW[: len(token_ids)]
        if ids_NW.shape != probabilities_NW.shape or ids_NW.ndim != 2 or len(ids_NW) != len(token_ids):
            raise ValueError(
                f"{len(token_ids)} drafts with q of {ids_NW.shape} tokens, {probabilities_NW.shape} numbers"
            )
        if ids_NW.shape[1] > MOST_CANDIDATES:
            raise ValueError(f"q has {ids_NW.shape[1]} tokens; {MOST_CANDIDATES} are possible")
        possible_NW = probabilities_NW > 0
        if not (probabilities_NW >= 0).all() or (abs(probabilities_NW.sum(axis=1) - 1) > 1e-3).any():
            raise ValueError("q has rows that are no distribution")
        if (possible_NW & ((ids_NW < 0) | (ids_NW >= vocab_size))).any():
            raise ValueError(f"q has tokens beyond the model's, which end at {vocab_size - 1}")
        if not (possible_NW & (ids_NW == np.array(token_ids)[:, None])).any(axis=1).all():
            raise ValueError("q has a row that its draft cannot be drawn from")


class Draft(NamedTuple):
    """Tokens that may follow the last known token of a sequence. `parents[i]`, smaller than i, is the draft before draft i; -1: none.

    `q`: a row for each draft, what it was drawn from, for acceptance "rejection" (the other rules look at the tokens alone). Drafts behind
    the same token are drawn without replacement: each has the whole distribution as its row, and was drawn from that less the drafts before
    it. The row is what was really drawn from, so it is cut to so many tokens before the draw; and which drafts there are may depend on
    those before them, but not on the draft itself: one that was drawn is not left out for what it is. None: they were chosen, by whatever
    rule. Of drafts that were drawn that is as right, and accepts fewer.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    q: Candidates | None = None

    def cut(self, num_tokens: int) -> Draft:
        """The first tokens: still a tree, since parents come first."""
        q = self.q and self.q.of(slice(num_tokens))
        return Draft(self.token_ids[:num_tokens], self.parents[:num_tokens], q)

    def first_branch(self) -> Draft:
        """The chain of first children."""
        places: list[int] = []
        for index, parent in enumerate(self.parents):
            if parent == (places[-1] if places else -1):
                places.append(index)
        return chain(tuple(self.token_ids[place] for place in places), self.q and self.q.of(places))

    def sound(self, vocab_size: int, num_tokens: int) -> Draft:
        """The first tokens, at most `num_tokens`, up to one that the model does not have or that follows nothing before it.

        Raises ValueError where `q` cannot be what they were drawn from: to leave out what was drawn would be no draw from it.
        """
        if self.q is not None:
            self.q.check(self.token_ids[:num_tokens], vocab_size)
        count = 0
        for token_id, parent in zip(self.token_ids, self.parents, strict=False):
            if count == num_tokens or not (0 <= token_id < vocab_size and -1 <= parent < count):
                break
            count += 1
        q = self.q and self.q.of(slice(count))
        return Draft(tuple(map(int, self.token_ids[:count])), tuple(map(int, self.parents[:count])), q)

    @property
    def depths(self) -> tuple[int, ...]:
        """Of each draft; 1 for those that follow the last known token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def path(self, index: int) -> tuple[int, ...]:
        """The tokens from the first down to draft `index`."""
        tokens: list[int] = []
        while index >= 0:
            tokens.append(self.token_ids[index])
            index = self.parents[index]
        return tuple(reversed(tokens))


class Drafts(NamedTuple):
    """What a speculator proposes for a step."""

    of: Mapping[int, Draft] = MappingProxyType({})  # by sequence id
    seconds: float = 0.0  # that it took to make them; what a device drafter takes is a part of its steps


NO_DRAFTS = Drafts()


def chain(token_ids: tuple[int, ...], q: Candidates | None = None) -> Draft:
    return Draft(token_ids, tuple(range(-1, len(token_ids) - 1)), q)
