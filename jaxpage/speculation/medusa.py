"""Drafts from the predictions of the model's Medusa heads, as a tree that does not change.

The method is that of Cai et al. 2024 (arXiv:2401.10774).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Ordered

import numpy as np

from jaxpage.speculation.proposal import DeviceProposer
from jaxpage.step.draft import Draft
from jaxpage.step.request import Request, Sequence

# For each draft: the ranks of the predictions that lead to it, its own last.
Choices = tuple[tuple[int, ...], ...]

# For heads without measured values: the chance that the first head's best prediction is right, and
# the factor for each later head. This is an assumption, of a shape that published heads have.
ASSUMED_FIRST = 0.6
ASSUMED_DECLINE = 0.8
RANKS = 10  # predictions of a head that a tree searched here may use


def assume_accuracies(num_heads: int) -> tuple[tuple[float, ...], ...]:
    """Returns for each head how often its best prediction is right, its second, and so on.

    Every prediction has the same chance where none before it was right.
    """
    probabilities = [ASSUMED_FIRST * ASSUMED_DECLINE**head for head in range(num_heads)]
    return tuple(
        tuple(probability * (1 - probability) ** rank for rank in range(RANKS))
        for probability in probabilities
    )


def search(accuracies: Ordered[Ordered[float]], num_drafts: int) -> Choices:
    """Returns the tree of `num_drafts` drafts of which most are right, the most likely draft first.

    Heads are taken to be right independently of each other. The search is greedy: it takes the
    draft with the highest product of accuracies along its path. No path is more likely than the one
    that it continues, so this is the best tree, and its first n drafts are the best tree of n.

    Args:
        accuracies: For each head, from 0 to 1: how often its best prediction is right, its second,
            and so on.
        num_drafts: The size of the tree.
    """
    choices: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]  # the root
    while heap and len(choices) <= num_drafts:  # the root is among the choices
        minus_probability, path = heapq.heappop(heap)
        choices.append(path)
        if len(path) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(path)]):
                heapq.heappush(heap, (minus_probability * accuracy, (*path, rank)))
    return tuple(choices[1:])


def best_first(choices: Choices, accuracies: Ordered[Ordered[float]]) -> Choices:
    """Returns a given tree in the order in which `search` would have it.

    Its first n drafts are its best n. Ranks without an accuracy come last.
    """

    def probability(path: tuple[int, ...]) -> float:
        rows = zip(path, accuracies, strict=False)
        return math.prod(row[rank] if rank < len(row) else 0.0 for rank, row in rows)

    return tuple(sorted(choices, key=lambda path: (-probability(path), path)))


def best_only(num_heads: int, num_drafts: int) -> Choices:
    """Returns the chain of every head's best prediction."""
    return tuple((0,) * depth for depth in range(1, min(num_heads, num_drafts) + 1))


def choices_of(
    choices: Choices | None, accuracies: Ordered[Ordered[float]], num_drafts: int, *, tree: bool
) -> Choices:
    """Returns the tree to draft: the given one, or the best of `num_drafts` drafts.

    Without `tree` the best one is a chain.
    """
    if choices is not None:
        return best_first(choices, accuracies)
    return search(accuracies, num_drafts) if tree else best_only(len(accuracies), num_drafts)


class MedusaProposer(DeviceProposer):
    """Drafts the same tree of the heads' predictions [J, W] each time.

    Head j gives the W most likely tokens, the best first.
    """

    def __init__(self, choices: Choices) -> None:
        """Takes the tree; in `choices` every path comes after the one that it continues."""
        super().__init__()
        places = {path: index for index, path in enumerate(choices)} | {(): -1}
        self._parents = tuple(places[path[:-1]] for path in choices)
        self._heads = np.array([len(path) - 1 for path in choices])
        self._ranks = np.array([path[-1] for path in choices])

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """Drafts the first `num_drafts` drafts of the tree."""
        candidates_JW = self.candidates_after(sequence)
        if candidates_JW is None:
            return None
        token_ids = candidates_JW[self._heads[:num_drafts], self._ranks[:num_drafts]]
        return Draft(tuple(token_ids.tolist()), self._parents[:num_drafts])
