"""Counts how often every short run of tokens occurs in some texts, and what follows it.

This is a suffix tree with counts that grows by single tokens, as in SuffixDecoding (Oliaro et al.
2024, arXiv:2411.04975). A million edges take about 150 MB, as plain numbers in one table. A text
takes one edge for each of its tokens, and one for every different run in it that occurs more than
once.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxpage.step.draft import Draft, chain

ROOT = 0
_TOKEN_BITS = 32  # the key of an edge is node << 32 | token
_INDEX_BITS = 32  # a leaf is -1 - (text << 32 | index)


class ScoredDraft(NamedTuple):
    """Holds tokens that may follow, and how many of them are likely to be right.

    The score is the sum of their probabilities by the counts.
    """

    token_ids: list[int]
    parents: list[int] | None  # those of a draft; None: each follows the one before
    score: float

    @property
    def draft(self) -> Draft:
        """Returns the tokens as a draft."""
        token_ids = tuple(self.token_ids)
        return chain(token_ids) if self.parents is None else Draft(token_ids, tuple(self.parents))


NOTHING = ScoredDraft([], None, 0.0)


class SuffixTree:
    """Holds every run of at most `depth` tokens of its texts, as a path from the root.

    A place in the tree is a number. From 0 on it is a node, after a run that occurs more than once.
    Below 0 it is a leaf, for the one place of the one text that such a run leads to; the rest of
    the path is the rest of that text. So most of a tree is never built.
    """

    def __init__(self, depth: int) -> None:
        """Makes an empty tree.

        Args:
            depth: The most tokens of a run, at least 2, since something has to follow something.
        """
        self.depth = depth
        self._edges: dict[int, int] = {}  # the place after a node and a token
        self._counts = array("i", [0])  # by node: how often its run occurs
        # By node: the token that follows most often; of several the one that did so last.
        self._best = array("q", [-1])
        self._best_counts = array("i", [0])
        # By node, if several tokens follow: the tokens in the order in which they appeared.
        self._followers: dict[int, list[int]] = {}
        self._texts: list[Sequence[int]] = []
        self._sizes: list[int] = []  # by text: tokens of it that are in the tree
        # By text that may grow: the nodes after its last 1, 2, ... tokens.
        self._ends: list[list[int] | None] = []

    def __len__(self) -> int:
        """Returns the number of edges, by which memory goes."""
        return len(self._edges)

    def begin(self, token_ids: Sequence[int]) -> int:
        """Begins a text, whose tokens `grow` takes in, and returns its number.

        The tree keeps `token_ids`, which may get longer and change in no other way.
        """
        self._texts.append(token_ids)
        self._sizes.append(0)
        self._ends.append([])
        return len(self._texts) - 1

    def end(self, text: int) -> None:
        """Ends a text, which grows no more."""
        self._ends[text] = None

    def size(self, text: int) -> int:
        """Returns how many tokens of a text are in the tree."""
        return self._sizes[text]

    def grow(self, text: int, size: int) -> None:
        """Takes in the text's tokens up to `size`.

        The work is one place for every token, and one for every run that ends with it and is not
        new.
        """
        token_ids = self._texts[text]
        for index in range(self._sizes[text], size):
            self._append(text, token_ids[index], index + 1)

    def _append(self, text: int, token: int, size: int) -> None:
        edges = self._edges
        counts = self._counts
        best = self._best
        best_counts = self._best_counts
        ends = self._ends[text]
        assert ends is not None, "the text has ended"
        self._sizes[text] = size
        grown: list[int] = []
        for node in (ROOT, *ends):
            key = node << _TOKEN_BITS | token
            place = edges.get(key)
            if place is None:
                edges[key] = _leaf(text, size)
                count = 1
                # Nothing is drafted after the empty run, so the root needs no list of what follows.
                if node and best_counts[node]:
                    self._followers.setdefault(node, [best[node]]).append(token)
            else:
                if place < 0:
                    place = self._branch(key, place, len(grown) + 1)
                count = counts[place] = counts[place] + 1
                grown.append(place)
            if count >= best_counts[node]:
                best[node] = token
                best_counts[node] = count
        del grown[self.depth - 1 :]  # after the longest runs nothing is kept
        self._ends[text] = grown

    def _branch(self, key: int, leaf: int, depth: int) -> int:
        """Makes a node of a leaf, because its run is about to occur once more."""
        node = len(self._counts)
        self._edges[key] = node
        self._counts.append(1)
        self._best.append(-1)
        self._best_counts.append(0)
        text, index = _position(leaf)
        if depth == self.depth:
            pass
        elif index < self._sizes[text]:
            token = self._texts[text][index]
            self._edges[node << _TOKEN_BITS | token] = leaf - 1
            self._best[node] = token
            self._best_counts[node] = 1
        elif (ends := self._ends[text]) is not None:
            ends.append(node)  # the other text ends right here, and goes on from here
        return node

    def ends(self, text: int) -> Sequence[int]:
        """Returns the places after the last 1, 2, ... tokens of a text that may grow.

        There are only those that occur elsewhere, too.
        """
        return self._ends[text] or ()

    def find(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the places after the last 1, 2, ... of the tokens, as far as they occur."""
        edges = self._edges
        places = list[int]()
        for length in range(1, min(len(token_ids), self.depth - 1) + 1):
            place: int | None = ROOT
            for index in range(len(token_ids) - length, len(token_ids)):
                assert place is not None
                place = edges.get(place << _TOKEN_BITS | token_ids[index])
                if place is None:
                    return places
                if place < 0:
                    return places + self._alone(place, token_ids, index + 1, length)
            assert place is not None
            places.append(place)
        return places

    def _alone(self, leaf: int, token_ids: Sequence[int], taken: int, length: int) -> list[int]:
        """Returns the places after the last `length`, `length` + 1, ... tokens from a leaf on.

        Those before `taken` lead to the leaf. The runs occur once if at all, so it is the same
        place for all of them.
        """
        text, index = _position(leaf)
        # The place after the last token, if the text goes on like the tokens.
        stop = index + len(token_ids) - taken
        tokens = self._texts[text]
        if stop > self._sizes[text] or list(tokens[index:stop]) != list(token_ids[taken:]):
            return []
        maximum = min(len(token_ids), self.depth - 1, stop)
        max_length = length
        while max_length < maximum and tokens[stop - max_length - 1] == token_ids[-max_length - 1]:
            max_length += 1
        return [_leaf(text, stop)] * (max_length - length + 1)

    def count(self, place: int) -> int:
        """Returns how often the run before a place occurs."""
        return self._counts[place] if place >= 0 else 1

    def path(self, place: int, num_tokens: int, minimum: float) -> ScoredDraft:
        """Returns the most frequent token after a place, the most frequent after that, and so on.

        Args:
            place: The place.
            num_tokens: The most tokens.
            minimum: The least probability of a token together with all that lead to it.
        """
        counts = self._counts
        best = self._best
        best_counts = self._best_counts
        token_ids: list[int] = []
        probability = 1.0
        score = 0.0
        while place >= 0 and len(token_ids) < num_tokens and (count := best_counts[place]):
            token = best[place]
            probability *= count / counts[place]
            if probability < minimum:
                break
            token_ids.append(token)
            score += probability
            place = self._edges[place << _TOKEN_BITS | token]
        if place < 0:
            text, index = _position(place)
            continuation = self._texts[text][
                index : min(index + num_tokens - len(token_ids), self._sizes[text])
            ]
            # A run that occurred once has one continuation, whose tokens are as probable as it is.
            token_ids += continuation
            score += probability * len(continuation)
        return ScoredDraft(token_ids, None, score)

    def tree(self, place: int, num_tokens: int, depth: int, minimum: float) -> ScoredDraft:
        """Returns the most likely tokens after a place, whichever way they lead.

        They are no deeper than `depth`; the other arguments are those of `path`.
        """
        token_ids: list[int] = []
        parents: list[int] = []
        score = 0.0
        number = itertools.count()  # the order in which equally likely ones come up
        heap = [
            (-share, next(number), token, -1, 1, child)
            for token, child, share in self._following(place)
        ]
        heapq.heapify(heap)
        while heap and len(token_ids) < num_tokens and -heap[0][0] >= minimum:
            minus_probability, _, token, parent, at, place = heapq.heappop(heap)
            parents.append(parent)
            token_ids.append(token)
            score -= minus_probability
            if at < depth:
                for token, child, share in self._following(place):
                    item = (
                        minus_probability * share,
                        next(number),
                        token,
                        len(token_ids) - 1,
                        at + 1,
                        child,
                    )
                    heapq.heappush(heap, item)
        return ScoredDraft(token_ids, parents, score)

    def _following(self, place: int) -> Iterator[tuple[int, int, float]]:
        """Yields the tokens after a place, the places after them, and how often each follows."""
        if place >= 0:
            tokens = self._followers.get(place) or (
                [self._best[place]] if self._best_counts[place] else []
            )
            for token in tokens:
                child = self._edges[place << _TOKEN_BITS | token]
                yield token, child, self.count(child) / self._counts[place]
        else:
            text, index = _position(place)
            if index < self._sizes[text]:
                yield self._texts[text][index], place - 1, 1.0


def _leaf(text: int, index: int) -> int:
    """Returns the place of a run that occurs once: before token `index` of the text.

    One less is the place after that token.
    """
    return -1 - (text << _INDEX_BITS | index)


def _position(leaf: int) -> tuple[int, int]:
    code = -1 - leaf
    return code >> _INDEX_BITS, code & (1 << _INDEX_BITS) - 1
