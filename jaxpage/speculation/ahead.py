"""Drafts that the device made ahead of the text, in the step before: a draft model's, or an EAGLE head's."""

from __future__ import annotations

import numpy as np

from jaxpage.speculation.proposal import DeviceProposer
from jaxpage.step.draft import Candidates, Draft
from jaxpage.step.request import Request, Sequence


class AheadProposer(DeviceProposer):
    """Its candidates are [J, G, Y]: of each candidate the token, the place in [J * Y] of the one before it, and the bits of its score;
    and of one that was drawn the ids and the bits of the probabilities of what it was drawn from.
    """

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """The candidates with the highest scores. None is above that of the one before it, so that they hang together (EAGLE-2)."""
        candidates = self.candidates_behind(sequence)
        if candidates is None:
            return None
        token_ids, parents, bits, *drawn_from = candidates.transpose(1, 0, 2).reshape(
            candidates.shape[1], -1
        )
        scores = bits.view(np.float32)
        best = np.argsort(-scores, kind="stable")[:num_drafts]
        places = best[scores[best] > -np.inf].tolist()
        drafted = {-1: -1} | {place: index for index, place in enumerate(places)}
        draft = Draft(
            tuple(token_ids[places].tolist()),
            tuple(drafted[parent] for parent in parents[places].tolist()),
        )
        if not drawn_from:
            return draft
        ids_NW, bits_NW = np.split(np.stack(drawn_from, axis=1)[places], 2, axis=1)
        return draft._replace(q=Candidates(ids_NW, np.ascontiguousarray(bits_NW).view(np.float32)))
