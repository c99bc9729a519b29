"""Drafts that the device made ahead of the text, in the step before: a draft model's, or an EAGLE head's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jaxpage.request import Request, Sequence, SequenceGroup
from jaxpage.speculation.proposal import Candidates, Draft


class AheadProposer:
    """Keeps, of each sequence, the candidates of its last step. They hold until a token is known beyond the one drawn in that step."""

    def __init__(self) -> None:
        self._guesses: dict[int, tuple[int, npt.NDArray[np.int32]]] = {}  # by sequence id: known tokens, [J, G, Y]

    def observe(self, sequence_id: int, num_known_tokens: int, guesses: npt.NDArray[np.int32]) -> None:
        """guesses: [J, G, Y]: of each candidate the token, the place in [J * Y] of the one before it, and the bits of its score; and of one
        that was drawn the ids and the bits of the probabilities of what it was drawn from."""
        self._guesses[sequence_id] = num_known_tokens, guesses

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """The candidates with the highest scores. None is above that of the one before it, so that they hang together (EAGLE-2)."""
        num_known_tokens, guesses = self._guesses.get(sequence.sequence_id, (0, None))
        if guesses is None or num_known_tokens != len(sequence.token_ids):
            return None
        token_ids, parents, bits, *drawn_from = guesses.transpose(1, 0, 2).reshape(guesses.shape[1], -1)
        scores = bits.view(np.float32)
        best = np.argsort(-scores, kind="stable")[:num_drafts]
        places = best[scores[best] > -np.inf].tolist()
        drafted = {-1: -1} | {place: index for index, place in enumerate(places)}
        draft = Draft(tuple(token_ids[places].tolist()), tuple(drafted[parent] for parent in parents[places].tolist()))
        if not drawn_from:
            return draft
        ids_NW, bits_NW = np.split(np.stack(drawn_from, axis=1)[places], 2, axis=1)
        return draft._replace(q=Candidates(ids_NW, np.ascontiguousarray(bits_NW).view(np.float32)))

    def forget(self, group: SequenceGroup) -> None:
        for sequence_id in group.sequence_ids:
            self._guesses.pop(sequence_id, None)
