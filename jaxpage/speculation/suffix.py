"""Drafts by suffix decoding: what most often followed the last tokens.

It looks in the sequence itself and in the answers of earlier requests. This is SuffixDecoding
(Oliaro et al. 2024, arXiv:2411.04975), with the settings that vLLM gives it. The more of the last
tokens are the same, the more is drafted, so that a sequence drafts much where it repeats something
and little where it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field

from jaxpage.settings.draft_settings import SuffixDecoding
from jaxpage.speculation.proposal import Proposer
from jaxpage.speculation.suffix_tree import NOTHING, ScoredDraft, SuffixTree
from jaxpage.step.draft import Draft
from jaxpage.step.request import Request, Sequence, SequenceGroup

# Tokens that are taken in while every sequence is asked once: some milliseconds. Long prompts take
# several steps.
AT_ONCE = 1024
OWN_EDGES = 1 << 22  # in the trees of all sequences together; with more, sequences do without
SHARED_EDGES = 1 << 21  # in the trees that sequences share; with more, the older half is given up


@dataclass
class _OwnTree:
    """Holds a sequence's tokens, prompt and output."""

    tree: SuffixTree | None
    requested: int = 0  # the last round in which it was asked


@dataclass
class _Written:
    """Holds the output of a sequence, as far as it is in the trees that sequences share."""

    start: int  # tokens of the sequence before it
    tree: SuffixTree | None = None
    text: int = 0
    token_ids: list[int] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)

    def holds(self, sequence: Sequence, num_tokens: int) -> bool:
        """Returns whether it has the last `num_tokens` tokens of the sequence."""
        return self.stop == len(sequence.token_ids) and len(self.token_ids) >= num_tokens


class SuffixProposer(Proposer):
    """Asks the tree of a sequence and those of its salt.

    The draft with the highest score wins; of equal ones it is the sequence's own.
    """

    def __init__(
        self,
        settings: SuffixDecoding,
        *,
        tree: bool = False,
        own_edges: int = OWN_EDGES,
        shared_edges: int = SHARED_EDGES,
        at_once: int = AT_ONCE,
    ) -> None:
        """Begins without trees.

        Args:
            settings: The settings of the method.
            tree: Drafts branch.
            own_edges: The most edges of the trees of all sequences.
            shared_edges: The most edges of the trees that sequences share.
            at_once: The tokens that are taken in while every sequence is asked once.
        """
        self._settings = settings
        self._branches = tree
        self._own_edges = own_edges
        self._at_once = at_once
        self._own_trees: dict[int, _OwnTree] = {}  # by sequence id
        self._num_own_edges = 0
        self._shared = _Shared(settings, shared_edges)
        self._round = 0
        self._left = at_once  # tokens that may still be taken in this round

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """Returns the best draft of the sequence's own tree and of those that it shares."""
        state = self._look_up(sequence)
        salt = request.params.cache_salt
        token_ids = sequence.token_ids
        self._left -= self._shared.take(salt, sequence, self._left)
        best_draft = NOTHING
        if self._grow(state, token_ids) and state.tree is not None:
            best_draft = self._best(state.tree, state.tree.ends(0), num_drafts, best_draft)
        for tree, places in self._shared.places(salt, sequence):
            best_draft = self._best(tree, places, num_drafts, best_draft)
        return best_draft.draft if best_draft.token_ids else None

    def forget(self, group: SequenceGroup) -> None:
        """Keeps the answers of a request that has ended, and forgets its sequences."""
        for sequence in group.sequences:
            if sequence.sequence_id in self._own_trees:
                self._shared.take(group.request.params.cache_salt, sequence, self._at_once)
        for sequence_id in group.sequence_ids:
            self._shared.end(sequence_id)
            state = self._own_trees.pop(sequence_id, None)
            if state is not None and state.tree is not None:
                self._num_own_edges -= len(state.tree)

    def _look_up(self, sequence: Sequence) -> _OwnTree:
        """Returns what is known of a sequence that is asked for drafts.

        A round ends when a sequence is asked for a second time.
        """
        state = self._own_trees.get(sequence.sequence_id)
        if state is None:
            tree = SuffixTree(self._settings.max_tree_depth)
            tree.begin(sequence.token_ids)
            state = self._own_trees[sequence.sequence_id] = _OwnTree(tree)
        elif state.requested == self._round:
            self._round += 1
            self._left = self._at_once
        state.requested = self._round
        return state

    def _grow(self, state: _OwnTree, token_ids: list[int]) -> bool:
        """Takes in what there is time for; returns whether the sequence's tree then has all."""
        tree = state.tree
        if tree is None:
            return False
        size = tree.size(0)
        before = len(tree)
        stop = min(len(token_ids), size + max(0, self._left))
        tree.grow(0, stop)
        self._left -= stop - size
        self._num_own_edges += len(tree) - before
        if self._num_own_edges > self._own_edges:
            self._num_own_edges -= len(tree)
            state.tree = None
        return stop == len(token_ids)

    def _best(
        self, tree: SuffixTree, places: TokenIds[int], num_drafts: int, best: ScoredDraft
    ) -> ScoredDraft:
        """Returns the better one of `best` and of what a tree drafts.

        The tree drafts what has the highest score, and of equals what has the longest match. The
        places are those after the last 1, 2, ... tokens.
        """
        settings = self._settings
        # The draft before: how often its match occurs, and how long it could be.
        last = (0, 0)
        for length in range(len(places), 0, -1):
            place = places[length - 1]
            depth = tree.depth - length
            maximum = min(num_drafts, int(length * settings.max_spec_factor))
            count = tree.count(place)
            size = maximum if self._branches else min(maximum, depth)
            if size <= best.score or (count == last[0] and size <= last[1]):
                # No token is more than certain; and what occurs in the same places goes on in the
                # same way.
                continue
            last = count, size
            if self._branches:
                tree_of_drafts = tree.tree(place, maximum, depth, settings.min_token_prob)
            else:
                tree_of_drafts = tree.path(place, size, settings.min_token_prob)
            if tree_of_drafts.score > best.score:
                best = tree_of_drafts
        return best


class _Shared:
    """Holds the answers of requests, in a tree for each salt and in two generations.

    When the young generation is full, the old one is given up. So at most as much is kept as the
    limits say, and at least half of it, the latest; and nothing is ever taken out of a tree.
    """

    def __init__(self, settings: SuffixDecoding, max_edges: int) -> None:
        self._depth = settings.max_tree_depth
        self._max_texts = settings.max_cached_requests
        self._max_edges = max_edges
        self._young: dict[str | None, SuffixTree] = {}
        self._old: dict[str | None, SuffixTree] = {}
        self._num_texts = 0  # in the young generation, one for each sequence
        self._num_edges = 0
        self._written: dict[int, _Written] = {}  # by sequence id

    def places(
        self, salt: str | None, sequence: Sequence
    ) -> Iterator[tuple[SuffixTree, TokenIds[int]]]:
        """Yields the trees of a salt, the younger first, with places in them.

        The places are those after the sequence's last 1, 2, ... tokens.
        """
        written = self._written.get(sequence.sequence_id)
        for trees in (self._young, self._old):
            if (tree := trees.get(salt)) is not None:
                # The tree has what the sequence wrote, so a run that occurs only there has nothing
                # after it.
                if (
                    written is not None
                    and written.tree is tree
                    and written.holds(sequence, tree.depth)
                ):
                    yield tree, tree.ends(written.text)
                else:
                    yield tree, tree.find(sequence.token_ids[-tree.depth :])

    def take(self, salt: str | None, sequence: Sequence, maximum: int) -> int:
        """Takes in what the sequence has written since last time, at most `maximum` tokens.

        Returns:
            How many tokens were taken in.
        """
        if not self._max_texts:
            return 0
        written = self._written.get(sequence.sequence_id)
        if written is None:
            written = self._written[sequence.sequence_id] = _Written(sequence.num_prompt_tokens)
        token_ids = sequence.token_ids[written.stop : written.stop + max(0, maximum)]
        if token_ids:
            tree = self._room(salt, written)
            before = len(tree)
            written.token_ids += token_ids
            tree.grow(written.text, len(written.token_ids))
            self._num_edges += len(tree) - before
        return len(token_ids)

    def _room(self, salt: str | None, written: _Written) -> SuffixTree:
        """Returns the tree that the sequence writes to."""
        is_full = written.tree is None and self._num_texts >= max(1, self._max_texts // 2)
        if is_full or self._num_edges > self._max_edges // 2:
            self._turn()
        if written.tree is None:
            if salt not in self._young:
                self._young[salt] = SuffixTree(self._depth)
            tree = written.tree = self._young[salt]
            written.text = tree.begin(written.token_ids)
            self._num_texts += 1
        return written.tree

    def _turn(self) -> None:
        # With a limit of 1 the young generation alone holds all that may be kept.
        self._old = self._young if self._max_texts > 1 else {}
        self._young = {}
        self._num_texts = self._num_edges = 0
        for written in self._written.values():
            written.start = written.stop
            written.token_ids = []
            written.tree = None

    def end(self, sequence_id: int) -> None:
        written = self._written.pop(sequence_id, None)
        if written is not None and written.tree is not None:
            written.tree.end(written.text)
