"""What every proposer gives: tokens that may follow a sequence, as a tree. A chain is a tree."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from jaxpage.request import Request, Sequence, SequenceGroup


class Draft(NamedTuple):
    """Tokens that may follow the last known token of a sequence. `parents[i]`, smaller than i, is the draft before draft i; -1: none."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]

    def cut(self, num_tokens: int) -> Draft:
        """The first tokens: still a tree, since parents come first."""
        return Draft(self.token_ids[:num_tokens], self.parents[:num_tokens])

    def first_branch(self) -> Draft:
        """The chain of first children."""
        tokens: list[int] = []
        last = -1
        for index, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if parent == last:
                tokens.append(token_id)
                last = index
        return chain(tuple(tokens))

    def sound(self, vocab_size: int, num_tokens: int) -> Draft:
        """The first tokens, at most `num_tokens`, up to one that the model does not have or that follows nothing before it."""
        count = 0
        for token_id, parent in zip(self.token_ids, self.parents, strict=False):
            if count == num_tokens or not (0 <= token_id < vocab_size and -1 <= parent < count):
                break
            count += 1
        return Draft(tuple(map(int, self.token_ids[:count])), tuple(map(int, self.parents[:count])))

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


def chain(token_ids: tuple[int, ...]) -> Draft:
    return Draft(token_ids, tuple(range(-1, len(token_ids) - 1)))


class Proposer(Protocol):
    """Guesses what follows. A wrong guess costs time and changes no text.

    A guess shows in how long steps take. So what one request is told must not come from another, unless both have the same `cache_salt`.
    """

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """At most so many drafts behind the known tokens, which only ever grow. None: nothing comes to mind.

        Not every step asks, so there may be many more tokens than last time.
        """
        ...

    def forget(self, group: SequenceGroup) -> None:
        """The request has ended. Its sequences are as it left them; there may be some that nobody asked about."""
        ...


@runtime_checkable
class Observer(Protocol):
    """A proposer that hears what the heads of the model guess."""

    def observe(self, sequence_id: int, num_known_tokens: int, guesses_JW: npt.NDArray[np.int32]) -> None:
        """What each head takes for the likeliest, best first. Head j guesses the token that is known when j + 1 more are.

        Args:
            num_known_tokens: of the sequence when the token that was drawn beside the guesses is one of them. It may never be: what
                was drawn may end the sequence before.
        """
        ...


@runtime_checkable
class DrawObserver(Protocol):
    """A proposer that hears what was drawn behind all its drafts, right or wrong."""

    def drawn(self, sequence_id: int, num_known_tokens: int, draft: Draft, token_ids: TokenIds[int]) -> None:
        """A step verified a draft, or what was left of it.

        Args:
            num_known_tokens: of the sequence, before the step.
            token_ids: one behind the last known token, and one behind each draft. Negative: nothing could be drawn there.
        """
        ...
