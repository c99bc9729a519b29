"""Drafts of every kind, right and wrong, for tests that know what follows."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxpage.speculation import NoSpeculation
from jaxpage.speculation.speculator import filter_drafts
from jaxpage.step.draft import Draft, Drafts, chain
from jaxpage.step.request import SequenceGroup
from jaxpage.step.strategy import Strategy

NUM_TOKEN_IDS = 257  # of the small models
MAX_DRAFTS = 7
# by prompt, seed and sample: what the request draws
Outputs = Mapping[tuple[tuple[int, ...], int, int], Sequence[int]]


def random_draft(
    rng: random.Random,
    future: Sequence[int],
    num_tokens: int,
    num_token_ids: int,
    *,
    branches: bool = True,
    share_right: float = 0.7,
) -> Draft:
    """Returns a draft that follows `future` for a while, on any of its branches.

    Some tokens are there already, and some are beyond the end.
    """
    tokens: list[int] = []
    parents: list[int] = []
    depths = {-1: 0}  # of those that are right: how much of the future stands up to there
    for index in range(num_tokens):
        parent = (
            rng.choice([index - 1, rng.randrange(-1, index)]) if branches and index else index - 1
        )
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


# What follows, at most how many drafts, and a source of chance: the draft.
Kind = Callable[[random.Random, list[int], int], Draft]


def oracle(rng: random.Random, future: list[int], maximum: int) -> Draft:
    return chain(tuple(future[:maximum]))


def wrong(rng: random.Random, future: list[int], maximum: int) -> Draft:
    """Returns a draft that has not one right token."""
    return chain(tuple((token_id + 1) % NUM_TOKEN_IDS for token_id in future[:maximum]))


def any_length(rng: random.Random, future: list[int], maximum: int) -> Draft:
    return random_draft(rng, future, rng.randrange(maximum + 1), NUM_TOKEN_IDS, branches=False)


def any_tree(rng: random.Random, future: list[int], maximum: int) -> Draft:
    return random_draft(rng, future, rng.randrange(maximum + 1), NUM_TOKEN_IDS)


def too_many(rng: random.Random, future: list[int], maximum: int) -> Draft:
    """Drafts what follows, past any end, and more than a step holds."""
    return random_draft(rng, future, maximum + 40, NUM_TOKEN_IDS, branches=False, share_right=1.0)


def duplicates(rng: random.Random, future: list[int], maximum: int) -> Draft:
    """Returns a draft in which every token stands twice after each of the two before it."""
    parents = [-1, -1] + [parent for parent in range(maximum) for _ in range(2)]
    depths = Draft((0,) * maximum, tuple(parents[:maximum])).depths
    known = [depth for depth in depths if depth <= len(future)]
    return Draft(tuple(future[depth - 1] for depth in known), tuple(parents[: len(known)]))


def right_branch(rng: random.Random, future: list[int], maximum: int, *, last: bool) -> Draft:
    """Returns a draft with a right token and a wrong one at every depth.

    What follows comes after the right one.
    """
    tokens: list[int] = []
    parents: list[int] = []
    right = -1
    for token_id in future[: maximum // 2]:
        pair = [token_id, (token_id + 1) % NUM_TOKEN_IDS]
        tokens += pair[::-1] if last else pair
        parents += [right, right]
        right = len(tokens) - 1 - (not last)
    return Draft(tuple(tokens), tuple(parents))


KINDS: dict[str, Kind] = {
    "oracle": oracle,
    "wrong": wrong,
    "any length": any_length,
    "any tree": any_tree,
    "too many": too_many,
    "duplicates": duplicates,
    "right branch first": functools.partial(right_branch, last=False),
    "right branch last": functools.partial(right_branch, last=True),
}


class Drafter(NoSpeculation):
    """Stands in for an engine's speculator. Drafts for every running sequence, beams too, by what
    `outputs` say that follows.

    A request that is not among them gets drafts at random.
    """

    def __init__(
        self, outputs: Outputs, seed: int = 0, strategies: Mapping[int, Strategy] | None = None
    ) -> None:
        self.outputs = outputs
        self.strategies = strategies  # of the engine
        self.kind: Kind = oracle
        self._rng = random.Random(seed)

    def propose(self, running: Iterable[SequenceGroup]) -> Drafts:
        drafts = {}
        for group in running:
            for sequence in group.unfinished:
                key = group.request.prompt_token_ids, group.request.seed, sequence.sample_index
                future = self.outputs.get(key, ())[sequence.num_output_tokens :]
                draft = self.kind(self._rng, list(future), MAX_DRAFTS)
                if draft.token_ids:
                    drafts[sequence.sequence_id] = draft
        return Drafts(drafts if self.strategies is None else filter_drafts(drafts, self.strategies))
