"""Defines drafts: tokens that may follow a sequence, as a tree. A chain is a tree without branches.

known ─┬─ draft 0 ─┬─ draft 2        parents = (-1, -1, 0, 0)
       │           └─ draft 3        depths  = ( 1,  1, 2, 2)
       └─ draft 1                    a parent comes before its children
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpage.shapes import MAX_CANDIDATES

# It takes the place of a token that the step itself draws and goes on with; see
# `StepLimits.num_steps`.
PLACEHOLDER = -1


class Candidates(NamedTuple):
    """The distributions that drafts were drawn from.

    A row has the tokens that had a chance, with probabilities that sum to 1.

    Attributes:
        token_ids_NW: At most MAX_CANDIDATES ids for each draft, padded with -1.
        probabilities_NW: Their probabilities, padded with 0.
    """

    token_ids_NW: npt.NDArray[np.int32]
    probabilities_NW: npt.NDArray[np.float32]

    def of(self, places: list[int] | slice) -> Candidates:
        """Returns the distributions of some of the drafts."""
        return Candidates(self.token_ids_NW[places], self.probabilities_NW[places])

    def as_lists(self) -> list[tuple[list[int], list[int]]]:
        """Returns the ids and the float32 bits of the probabilities of each draft, for a log.

        Both end with the last token that has a chance.
        """
        counts = [1 + int(np.flatnonzero(row)[-1]) for row in self.probabilities_NW]
        bits_NW = self.probabilities_NW.view(np.int32)
        rows = zip(self.token_ids_NW, bits_NW, counts, strict=True)
        return [(ids[:count].tolist(), bits[:count].tolist()) for ids, bits, count in rows]

    @classmethod
    def from_lists(cls, rows: list[tuple[list[int], list[int]]]) -> Candidates:
        """Returns the distributions that a log has.

        Raises:
            OverflowError, TypeError, ValueError: The lists are not those of `as_lists`.
        """
        width = max(len(ids) for ids, _ in rows)
        ids_NW = np.full((len(rows), width), -1, np.int32)
        bits_NW = np.zeros((len(rows), width), np.int32)
        for index, (ids, bits) in enumerate(rows):
            ids_NW[index, : len(ids)] = ids
            bits_NW[index, : len(ids)] = bits
        return cls(ids_NW, bits_NW.view(np.float32))

    def check(self, token_ids: tuple[int, ...], vocab_size: int) -> None:
        """Refuses distributions that the drafts cannot have been drawn from.

        Args:
            token_ids: The drafts.
            vocab_size: The number of tokens of the model.

        Raises:
            ValueError: A row is no distribution over the model's tokens, or gives its draft no
                chance.
        """
        ids_NW = self.token_ids_NW[: len(token_ids)]
        probabilities_NW = self.probabilities_NW[: len(token_ids)]
        is_matrix = ids_NW.shape == probabilities_NW.shape and ids_NW.ndim == 2
        if not is_matrix or len(ids_NW) != len(token_ids):
            shapes = f"{ids_NW.shape} tokens, {probabilities_NW.shape} numbers"
            raise ValueError(f"{len(token_ids)} drafts with q of {shapes}")
        if ids_NW.shape[1] > MAX_CANDIDATES:
            raise ValueError(f"q has {ids_NW.shape[1]} tokens; {MAX_CANDIDATES} are possible")
        possible_NW = probabilities_NW > 0
        # Written so that a NaN is refused, too: it is not 0 or more.
        is_positive = (probabilities_NW >= 0).all()
        # The probabilities are float32, whose rounded sum is not exactly 1.
        if not is_positive or (abs(probabilities_NW.sum(axis=1) - 1) > 1e-3).any():
            raise ValueError("q has rows that are no distribution")
        if (possible_NW & ((ids_NW < 0) | (ids_NW >= vocab_size))).any():
            raise ValueError(f"q has tokens beyond the model's, which end at {vocab_size - 1}")
        if not (possible_NW & (ids_NW == np.array(token_ids)[:, None])).any(axis=1).all():
            raise ValueError("q has a row that its draft cannot be drawn from")


class Draft(NamedTuple):
    """Tokens that may follow the last known token of a sequence.

    The distributions are for the acceptance "rejection"; the other rules look at the tokens alone.
    They have to be right in two ways, or acceptance would change what is sampled:
      * Drafts after the same token are drawn without replacement. The row of each is the whole
        distribution, and the draft was drawn from it less the drafts before it. The row is the one
        that was really drawn from, so it is cut to MAX_CANDIDATES tokens before the draw.
      * The number of drafts may depend on the drafts before it, but not on a draft itself: a draft
        that was drawn is not left out for what it is.

    Attributes:
        token_ids: The drafts.
        parents: The draft that each draft follows, a smaller number than its own, or -1 if it
            follows the last known token.
        q: The distribution that each draft was drawn from. None says that the drafts were chosen,
            by whatever rule. It may be None for drawn drafts, too; fewer of them are accepted then.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    q: Candidates | None = None

    def cut(self, num_tokens: int) -> Draft:
        """Returns the first drafts, which are a tree because parents come first."""
        q = self.q and self.q.of(slice(num_tokens))
        return Draft(self.token_ids[:num_tokens], self.parents[:num_tokens], q)

    def first_branch(self) -> Draft:
        """Returns the chain of first children."""
        places: list[int] = []
        for index, parent in enumerate(self.parents):
            # The first child of the last draft that was taken; its siblings come later.
            if parent == (places[-1] if places else -1):
                places.append(index)
        token_ids = tuple(self.token_ids[place] for place in places)
        return chain(token_ids, self.q and self.q.of(places))

    def sound(self, vocab_size: int, num_tokens: int) -> Draft:
        """Returns the first drafts up to one that is not possible.

        That is a token that the model does not have, or one that follows no draft before it.

        Args:
            vocab_size: The number of tokens of the model.
            num_tokens: The most drafts to return.

        Raises:
            ValueError: The drafts cannot have been drawn from `q`. They are not left out, because
                what remained would not be drawn from `q` either.
        """
        if self.q is not None:
            self.q.check(self.token_ids[:num_tokens], vocab_size)
        count = 0
        # A proposer may be a user's code, and its tuples may differ in length: the shorter one
        # counts.
        for token_id, parent in zip(self.token_ids, self.parents, strict=False):
            is_possible = 0 <= token_id < vocab_size and -1 <= parent < count
            if count == num_tokens or not is_possible:
                break
            count += 1
        # They may be numpy's integers, which JSON cannot write into a log.
        token_ids = tuple(map(int, self.token_ids[:count]))
        parents = tuple(map(int, self.parents[:count]))
        return Draft(token_ids, parents, self.q and self.q.of(slice(count)))

    @property
    def depths(self) -> tuple[int, ...]:
        """Returns the depth of each draft; it is 1 for those that follow the last known token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def path(self, index: int) -> tuple[int, ...]:
        """Returns the tokens from the root of the tree down to a draft."""
        tokens: list[int] = []
        while index >= 0:
            tokens.append(self.token_ids[index])
            index = self.parents[index]
        return tuple(reversed(tokens))


class Drafts(NamedTuple):
    """The drafts that a speculator proposes for a step.

    Attributes:
        of: The drafts by sequence id.
        seconds: The time that it took to make them. A device drafter takes none here: its time is
            part of its steps.
    """

    of: Mapping[int, Draft] = MappingProxyType({})
    seconds: float = 0.0


NO_DRAFTS = Drafts()


def chain(token_ids: tuple[int, ...], q: Candidates | None = None) -> Draft:
    """Returns a draft in which each token follows the one before it."""
    return Draft(token_ids, tuple(range(-1, len(token_ids) - 1)), q)
