"""Drafts from what the device made ahead of the text, in the step before.

The device drafter is a draft model or an EAGLE head.
"""

from __future__ import annotations

import numpy as np

from jaxpage.speculation.proposal import DeviceProposer
from jaxpage.step.draft import Candidates, Draft
from jaxpage.step.request import Request, Sequence


class AheadProposer(DeviceProposer):
    """Drafts the best candidates of the device drafter.

    A sequence's candidates are an array [J, G, Y]. Each candidate has its token, the place in [J *
    Y] of the one before it, and the bits of its score. One that was drawn also has the ids and the
    bits of the probabilities that it was drawn from.
    """

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """Drafts the candidates with the highest scores.

        No score is above that of the candidate before, so that the best ones hang together
        (EAGLE-2).
        """
        candidates = self.candidates_after(sequence)
        if candidates is None:
            return None
        token_ids, parents, bits, *drawn_from = candidates.transpose(1, 0, 2).reshape(
            candidates.shape[1], -1
        )
        scores = bits.view(np.float32)
        # A stable order keeps a candidate before those that continue it where the scores are equal.
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
