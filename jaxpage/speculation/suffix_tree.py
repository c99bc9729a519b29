"""How often every short run of tokens occurs in some texts and what follows it: a suffix tree with counts that grows by single tokens.

As in SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975). A million edges take about 150 MB, as plain numbers in one table; a text takes
one edge for each of its tokens and one for every different run in it that occurs more than once.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxpage.step.draft import Draft, chain

ROOT = 0
_TOKEN_BITS = 32  # of an edge's key: node << 32 | token
_INDEX_BITS = 32  # of a leaf


class ScoredDraft(NamedTuple):
    """Tokens that may follow, and how many of them are likely to be right: the sum of their probabilities by the counts."""

    token_ids: list[int]
    parents: list[int] | None  # as of a draft; None: each follows the one before
    score: float

    @property
    def draft(self) -> Draft:
        token_ids = tuple(self.token_ids)
        return chain(token_ids) if self.parents is None else Draft(token_ids, tuple(self.parents))


NOTHING = ScoredDraft([], None, 0.0)


class SuffixTree:
    """Every run of at most `depth` tokens of its texts is a path from the root.

    A place in the tree is a number. From 0 on it is a node: behind a run that occurs more than once. Below 0 it is a leaf, which stands for
    the one place of the one text that such a run leads to; the rest of the path is the rest of that text. So most of a tree is never built.
    """

    def __init__(self, depth: int) -> None:
        """depth: at least 2, since something has to follow something."""
        self.depth = depth
        self._edges: dict[int, int] = {}  # the place behind a node and a token
        self._counts = array("i", [0])  # by node: how often its run occurs
        # by node: the token that follows most often; of several the one that did so last
        self._best = array("q", [-1])
        self._best_counts = array("i", [0])
        self._followers: dict[
            int, list[int]
        ] = {}  # by node, if several tokens follow: in the order in which they appeared
        self._texts: list[Sequence[int]] = []
        self._sizes: list[int] = []  # by text: tokens of it that are in the tree
        # by text that may grow: nodes behind its last 1, 2, ... tokens
        self._ends: list[list[int] | None] = []

    def __len__(self) -> int:
        """Edges: what memory goes by."""
        return len(self._edges)

    def begin(self, token_ids: Sequence[int]) -> int:
        """A text, whose tokens `grow` takes in. The tree keeps `token_ids`, which may get longer and change in no other way."""
        self._texts.append(token_ids)
        self._sizes.append(0)
        self._ends.append([])
        return len(self._texts) - 1

    def end(self, text: int) -> None:
        """The text grows no more."""
        self._ends[text] = None

    def size(self, text: int) -> int:
        return self._sizes[text]

    def grow(self, text: int, size: int) -> None:
        """Takes in the text's tokens up to `size`. Work: one place for every token and for every run that ends with it and is no news."""
        token_ids = self._texts[text]
        for index in range(self._sizes[text], size):
            self._append(text, token_ids[index], index + 1)

    def _append(self, text: int, token: int, size: int) -> None:
        edges, counts, best, best_counts = self._edges, self._counts, self._best, self._best_counts
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
                if node and best_counts[node]:
                    self._followers.setdefault(node, [best[node]]).append(token)
            else:
                if place < 0:
                    place = self._branch(key, place, len(grown) + 1)
                count = counts[place] = counts[place] + 1
                grown.append(place)
            if count >= best_counts[node]:
                best[node], best_counts[node] = token, count
        del grown[self.depth - 1 :]  # behind the longest runs nothing is kept
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
            self._best[node], self._best_counts[node] = token, 1
        elif (ends := self._ends[text]) is not None:
            ends.append(node)  # the other text ends right here, and goes on from here
        return node

    def ends(self, text: int) -> Sequence[int]:
        """The places behind the last 1, 2, ... tokens of a growing text, as far as they occur elsewhere too."""
        return self._ends[text] or ()

    def find(self, token_ids: Sequence[int]) -> list[int]:
        """The places behind the last 1, 2, ... of the tokens, as far as they occur."""
        edges, places = self._edges, list[int]()
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
        """The places behind the last `length`, `length` + 1, ... tokens, of which those before `taken` lead to a leaf.

        They occur once if at all, so it is the same place for all of them.
        """
        text, index = _position(leaf)
        stop = index + len(token_ids) - taken  # where the last token would stand in the text
        tokens = self._texts[text]
        if stop > self._sizes[text] or list(tokens[index:stop]) != list(token_ids[taken:]):
            return []
        most = min(len(token_ids), self.depth - 1, stop)
        longest = length
        while longest < most and tokens[stop - longest - 1] == token_ids[-longest - 1]:
            longest += 1
        return [_leaf(text, stop)] * (longest - length + 1)

    def count(self, place: int) -> int:
        """How often the run before a place occurs."""
        return self._counts[place] if place >= 0 else 1

    def path(self, place: int, num_tokens: int, least: float) -> ScoredDraft:
        """The most frequent token behind the place, the most frequent behind that one, and so on.

        Args:
            num_tokens: at most.
            least: the probability of what is guessed: of all the tokens that lead to a token, and of itself.
        """
        counts, best, best_counts = self._counts, self._best, self._best_counts
        token_ids: list[int] = []
        probability, score = 1.0, 0.0
        while place >= 0 and len(token_ids) < num_tokens and (count := best_counts[place]):
            token = best[place]
            probability *= count / counts[place]
            if probability < least:
                break
            token_ids.append(token)
            score += probability
            place = self._edges[place << _TOKEN_BITS | token]
        if place < 0:
            text, index = _position(place)
            rest = self._texts[text][
                index : min(index + num_tokens - len(token_ids), self._sizes[text])
            ]
            token_ids += rest
            score += probability * len(rest)
        return ScoredDraft(token_ids, None, score)

    def tree(self, place: int, num_tokens: int, depth: int, least: float) -> ScoredDraft:
        """The likeliest tokens behind the place, whichever way they lead; no deeper than `depth`. The rest as for `path`."""
        token_ids: list[int] = []
        parents: list[int] = []
        score = 0.0
        number = itertools.count()  # of equally likely ones those that came up first
        heap = [
            (-share, next(number), token, -1, 1, behind)
            for token, behind, share in self._following(place)
        ]
        heapq.heapify(heap)
        while heap and len(token_ids) < num_tokens and -heap[0][0] >= least:
            minus_probability, _, token, parent, at, place = heapq.heappop(heap)
            parents.append(parent)
            token_ids.append(token)
            score -= minus_probability
            if at < depth:
                for token, behind, share in self._following(place):
                    item = (
                        minus_probability * share,
                        next(number),
                        token,
                        len(token_ids) - 1,
                        at + 1,
                        behind,
                    )
                    heapq.heappush(heap, item)
        return ScoredDraft(token_ids, parents, score)

    def _following(self, place: int) -> Iterator[tuple[int, int, float]]:
        """The tokens behind a place, the places behind them, and how often each follows."""
        if place >= 0:
            tokens = self._followers.get(place) or (
                [self._best[place]] if self._best_counts[place] else []
            )
            for token in tokens:
                behind = self._edges[place << _TOKEN_BITS | token]
                yield token, behind, self.count(behind) / self._counts[place]
        else:
            text, index = _position(place)
            if index < self._sizes[text]:
                yield self._texts[text][index], place - 1, 1.0


def _leaf(text: int, index: int) -> int:
    """The place of a run that occurs once: before token `index` of the text. One less is the place behind that token."""
    return -1 - (text << _INDEX_BITS | index)


def _position(leaf: int) -> tuple[int, int]:
    code = -1 - leaf
    return code >> _INDEX_BITS, code & (1 << _INDEX_BITS) - 1
