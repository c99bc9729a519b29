"""What a method of speculation gives, and what it may hear of a step."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from jaxpage.step.draft import Draft
from jaxpage.step.request import Request, Sequence, SequenceGroup


class Proposer(Protocol):
    """Guesses what follows. A wrong guess costs time. It changes no text with acceptance "coupled", and no distribution with "rejection".

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
    """A proposer that hears what the heads of the model guess, or what a drafter on the device drafted."""

    def observe(self, sequence_id: int, num_known_tokens: int, guesses: npt.NDArray[np.int32]) -> None:
        """
        Args:
            guesses: [J, W] of heads: what each takes for the likeliest, best first; head j guesses the token that is known when j + 1 more
                are. [J, G, Y] of a drafter: see `AheadProposer`.
            num_known_tokens: of the sequence when the token that was drawn beside the guesses is one of them. It may never be: what
                was drawn may end the sequence before.
        """
        ...


class KeptGuesses:
    """What an `Observer` does with what it hears: it keeps the guesses of each sequence's last step. They hold as long as no token is known
    beyond the one drawn in that step, so a sequence that was swapped out keeps them, one that is recomputed gets new ones, and a fork has
    those of the draw that it began with.
    """

    def __init__(self) -> None:
        self._guesses: dict[int, tuple[int, npt.NDArray[np.int32]]] = {}  # by sequence id; with the known tokens

    def observe(self, sequence_id: int, num_known_tokens: int, guesses: npt.NDArray[np.int32]) -> None:
        """See `Observer`."""
        self._guesses[sequence_id] = num_known_tokens, guesses

    def guesses_behind(self, sequence: Sequence) -> npt.NDArray[np.int32] | None:
        """Those that still hold."""
        num_known_tokens, guesses = self._guesses.get(sequence.sequence_id, (0, None))
        return guesses if num_known_tokens == len(sequence.token_ids) else None

    def forget(self, group: SequenceGroup) -> None:
        """See `Proposer`."""
        for sequence_id in group.sequence_ids:
            self._guesses.pop(sequence_id, None)


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


@runtime_checkable
class LikeliestObserver(Protocol):
    """A proposer that hears what the model takes for likely behind every token that a step draws from, drafts that were wrong included."""

    def heard(self, salts: TokenIds[str | None], token_ids: TokenIds[int], likeliest_BW: npt.NDArray[np.int32]) -> None:
        """
        Args:
            salts: of each draw: `cache_salt` of its request.
            token_ids: of each draw: the token behind which it stands.
            likeliest_BW: of each draw: the W likeliest tokens, best first.
        """
        ...
