"""Drafts of every kind, right and wrong, for tests that know what follows."""

from __future__ import annotations

import random
from collections.abc import Sequence

from jaxpage.speculation import Draft


def random_draft(
    rng: random.Random,
    future: Sequence[int],
    num_tokens: int,
    num_token_ids: int,
    *,
    branches: bool = True,
    share_right: float = 0.7,
) -> Draft:
    """A draft that follows `future` for a while, on any of its branches, with tokens that are there already and some beyond the end."""
    tokens: list[int] = []
    parents: list[int] = []
    depths = {-1: 0}  # of those that are right: how much of the future stands up to there
    for index in range(num_tokens):
        parent = rng.choice([index - 1, rng.randrange(-1, index)]) if branches and index else index - 1
        token = rng.randrange(num_token_ids)
        depth = depths.get(parent)
        if depth is not None and depth < len(future):
            if rng.random() < share_right:
                token = future[depth]
            if token == future[depth]:
                depths[index] = depth + 1
        tokens.append(token)
        parents.append(parent)
    return Draft(tuple(tokens), tuple(parents))
