"""Drafts that could never be accepted, taken out before they cost anything: no tokens of the model, or none that a grammar admits."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from jaxpage.step.draft import Draft
from jaxpage.step.strategy import Strategy

logger = logging.getLogger(__name__)


def possible(drafts: Mapping[int, Draft], strategies: Mapping[int, Strategy], vocab_size: int) -> Mapping[int, Draft]:
    """The drafts, less those that cannot be tokens, with what stands behind them. By sequence id.

    A draft that a grammar does not admit is wrong for certain, and one that ends the sequence saves no step: the draw before it gives the
    same token. A mask behind a draft is needed anyway if it is verified, and grammars keep it, so that asking costs no more than not.

    Drafts with a `q` stay: what they were drawn from includes what no grammar admits, and the rule that looks at it rejects those.
    """
    return {
        sequence_id: pruned
        for sequence_id, draft in drafts.items()
        if sequence_id in strategies
        and (pruned := _pruned(sequence_id, draft, strategies[sequence_id], vocab_size)).token_ids
    }


def _pruned(sequence_id: int, draft: Draft, strategy: Strategy, vocab_size: int) -> Draft:
    try:
        if draft.q is not None:
            return draft.sound(vocab_size, len(draft.token_ids))
        is_free = strategy.mask(sequence_id) is None
        if is_free and min(draft.token_ids) >= 0 and max(draft.token_ids) < vocab_size:
            return draft  # as most are
        place_of = {-1: -1}  # of those that stay, by their place before
        for place, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            if parent not in place_of or not 0 <= token_id < vocab_size:
                continue
            if is_free or strategy.mask(sequence_id, draft.path(place)) is not None:
                place_of[place] = len(place_of) - 1
    except Exception:  # of one request: nobody else notices
        logger.exception("nothing is drafted for sequence %d", sequence_id)
        return Draft((), ())
    kept = [place for place in place_of if place >= 0]
    return Draft(tuple(draft.token_ids[p] for p in kept), tuple(place_of[draft.parents[p]] for p in kept))
