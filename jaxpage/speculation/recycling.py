"""Drafts by token recycling: what the model found likely after a token the last time it had it.

A step knows the most likely tokens after each of its tokens, wrong drafts included, and uses one of
them (Luo et al. 2024, arXiv:2408.08696). Kept by the token that they follow they are a table, out
of which the tree after a sequence's last token is read: drafts without any weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxpage.shapes import MAX_DRAFTS
from jaxpage.speculation.medusa import best_only, search
from jaxpage.speculation.proposal import Proposer
from jaxpage.step.draft import Draft
from jaxpage.step.plan import StepPlan, StepResult
from jaxpage.step.request import Request, Sequence

NUM_RECYCLED = 8  # W: tokens that are kept for each token
# The most tables for salts, besides the one without. With 128,000 tokens a table takes 4 MB.
MAX_TABLES = 16
MIN_IDLE_STEPS = 64  # steps without use after which a table may be given to another salt
MAX_LEVELS = 6  # tokens ahead that a tree goes

# The shape of trees: how often the first token of a row comes next, the second, and so on, with the
# demo model, smoothed (docs/lab-log.md).
ACCURACIES = (0.48, 0.07, 0.045, 0.025, 0.025, 0.017, 0.015, 0.01)


@dataclass
class _Table:
    top_ids_VW: npt.NDArray[np.int32]  # -1: not known
    used: int = 0  # the last step that used it


class RecyclingProposer(Proposer):
    """Drafts from a table that all requests with the same `cache_salt` share.

    What one request sees is too little.
    """

    def __init__(self, vocab_size: int, *, tree: bool) -> None:
        """Makes the form of the drafts: a tree, or without `tree` a chain."""
        self._vocab_size = vocab_size
        choices = (
            search([ACCURACIES] * MAX_LEVELS, MAX_DRAFTS)
            if tree
            else best_only(MAX_DRAFTS, MAX_DRAFTS)
        )
        places = {path: index for index, path in enumerate(choices)} | {(): -1}
        # For each draft: the place of the one before it, and its rank among those after that one.
        self._template = [(places[path[:-1]], path[-1]) for path in choices]
        # By salt; the one that was used last is at the end.
        self._tables: OrderedDict[str | None, _Table] = OrderedDict()
        self._step = 0

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """Drafts the most likely tokens first; where the table has none others take their place."""
        table = self._tables.get(request.params.cache_salt)
        if table is None:
            return None
        table_VW = table.top_ids_VW
        followers = {-1: table_VW[sequence.token_ids[-1]].tolist()}  # by place in the template
        places = {-1: -1}
        token_ids = list[int]()
        parents = list[int]()
        for index, (parent, rank) in enumerate(self._template):
            if len(token_ids) == num_drafts:
                break
            if parent not in followers or (token_id := followers[parent][rank]) < 0:
                continue
            places[index] = len(token_ids)
            token_ids.append(token_id)
            parents.append(places[parent])
            followers[index] = table_VW[token_id].tolist()
        return Draft(tuple(token_ids), tuple(parents)) if token_ids else None

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in what is likely after each draw of a step."""
        # The candidates are the tokens that are likely after each draw.
        if plan.draft_depth and result.draft_candidates is not None:
            token_ids = [plan.rows[sample.row].token_ids[sample.offset] for sample in plan.samples]
            salts = [sample.params.cache_salt for sample in plan.samples]
            self.on_top_k(salts, token_ids, result.draft_candidates[: len(token_ids)])

    def on_top_k(
        self,
        salts: TokenIds[str | None],
        token_ids: TokenIds[int],
        top_ids_BW: npt.NDArray[np.int32],
    ) -> None:
        """Takes in the most likely tokens after some draws.

        Args:
            salts: The `cache_salt` of each draw's request.
            token_ids: The token before each draw. Of equal tokens the last counts.
            top_ids_BW: The W most likely tokens of each draw, the best first.
        """
        self._step += 1
        width = top_ids_BW.shape[1]
        for salt in dict.fromkeys(salts):
            if (table_VW := self._table(salt)) is not None:
                draws = [index for index, each in enumerate(salts) if each == salt]
                table_VW[np.array(token_ids)[draws], :width] = top_ids_BW[draws]

    def _table(self, salt: str | None) -> npt.NDArray[np.int32] | None:
        """Returns the table of a salt; None where too many others are in use.

        Otherwise, with a salt for each request, every step would make tables anew.
        """
        table = self._tables.get(salt)
        if table is None:
            others = [each for each in self._tables if each is not None]
            if salt is not None and len(others) >= MAX_TABLES:
                if self._step - self._tables[others[0]].used < MIN_IDLE_STEPS:
                    return None
                del self._tables[others[0]]
            table = self._tables[salt] = _Table(
                np.full((self._vocab_size, NUM_RECYCLED), -1, np.int32)
            )
        table.used = self._step
        self._tables.move_to_end(salt)
        return table.top_ids_VW
