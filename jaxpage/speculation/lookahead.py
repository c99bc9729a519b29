"""Lookahead decoding: drafts that the model makes itself while it verifies others (Fu et al. 2024, arXiv:2402.02057).

Beside the text a window of guesses is verified. What is drawn behind guesses are better guesses (a Jacobi iteration), and what came out of
one column of the window step by step is an n-gram that the model may well write. Those that begin with the last known token are drafts.
Window and n-grams make one tree, so that a guess which happens to be right is a token like any other.

Draws are coupled: their noise goes by position, in the window as in the text, so the iteration approaches the text at any temperature.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

from jaxpage.settings.draft_settings import Lookahead
from jaxpage.speculation.proposal import Proposer, verified_rows
from jaxpage.step.draft import Draft
from jaxpage.step.plan import StepPlan, StepResult
from jaxpage.step.request import Request, Sequence, SequenceGroup

# tokens that are taken in when a sequence is asked: a millisecond. Long prompts take several steps
AT_ONCE = 512
MOST_KEYS = 1 << 14  # of a pool: some 20 MB if all are used

Places = dict[tuple[int, int], int]  # in a draft, by the place before (-1: none) and the token


class Pool:
    """N-grams by their first token: of each token the latest few."""

    def __init__(self, length: int, most: int, most_keys: int = MOST_KEYS) -> None:
        """
        Args:
            length: of an n-gram, at least 2.
            most: that begin with a token. Which of them was added or met again longest ago gives way.
            most_keys: tokens; the same goes for them.
        """
        self._length = length
        self._most = most
        self._most_keys = most_keys
        # the latest last
        self._tails: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, token_id: int, tail: tuple[int, ...]) -> None:
        tails = self._tails.setdefault(token_id, OrderedDict())
        tails[tail] = None
        tails.move_to_end(tail)
        if len(tails) > self._most:
            tails.popitem(last=False)
        self._tails.move_to_end(token_id)
        if len(self._tails) > self._most_keys:
            self._tails.popitem(last=False)

    def take(self, token_ids: TokenIds[int], start: int, stop: int) -> None:
        """The n-grams of a text whose last token is one from `start` on, before `stop`."""
        for end in range(max(start, self._length - 1), stop):
            begin = end + 1 - self._length
            self.add(token_ids[begin], tuple(token_ids[begin + 1 : end + 1]))

    def behind(self, token_id: int) -> Iterable[tuple[int, ...]]:
        """The latest first."""
        return reversed(self._tails.get(token_id, OrderedDict()))


class Window:
    """Guesses of the tokens behind a text: that of row r in column c stands r + c places behind the last known token.

    Row 0, a chain, begins with that token itself. Every later guess was drawn behind the one above it in its column. Before it stands what
    leads to its column in row 0. N - 1 rows make an n-gram of each column with what is drawn behind its last guess.
    """

    def __init__(self, sizes: Lookahead, token_ids: list[int]) -> None:
        """token_ids: the text, which may get longer and change in no other way."""
        self._token_ids = token_ids
        self._most_rows = sizes.ngram - 1
        self._num_filled = 0
        self.num_known = len(token_ids)  # tokens of the text behind which it stands
        self.rows = [[token_ids[-1], *(self._filling() for _ in range(sizes.window - 1))]]

    def move(self) -> None:
        """Behind the text as it is now."""
        self._drop(len(self._token_ids) - self.num_known)
        self.num_known = len(self._token_ids)
        self.rows[0][0] = self._token_ids[-1]

    def paths(self) -> Iterable[tuple[int, ...]]:
        """Of each column: the guesses from behind the last known token down to its last."""
        for column in range(len(self.rows[0])):
            yield (*self.rows[0][1 : column + 1], *(row[column] for row in self.rows[1:]))

    def hear(self, drawn: Iterable[int | None], pool: Pool) -> None:
        """What was drawn behind each of the paths; None: unknown. One token more is known from now on."""
        last, row = self.rows[-1], list[int]()
        for column, token_id in enumerate(drawn):
            if token_id is None:  # as the row before has it for the same place
                token_id = last[column + 1] if column + 1 < len(last) else self._filling()
            elif len(self.rows) == self._most_rows:
                first, *between = (row[column] for row in self.rows)
                pool.add(first, (*between, token_id))
            row.append(token_id)
        self.rows.append(row)
        self.num_known += 1
        if len(self.rows) > self._most_rows:
            del self.rows[0]
        else:
            self._drop(1)

    def _drop(self, num_columns: int) -> None:
        """Gives up the first columns, whose places are known. New ones are, to begin with, parts of the text."""
        for _ in range(min(num_columns, len(self.rows[0]))):
            for row in self.rows:
                del row[0]
                row.append(self._filling())

    def _filling(self) -> int:
        """The tokens of the text, one after the other and over again."""
        self._num_filled += 1
        return self._token_ids[(self._num_filled - 1) % len(self._token_ids)]


@dataclass
class _Drafted:
    """A sequence that is drafted for."""

    window: Window
    pool: Pool
    num_taken: int  # of its tokens, into the pool


class LookaheadProposer(Proposer):
    """The samples of a request share their n-grams, those of the text and those that were drawn; each has a window of its own."""

    def __init__(self, sizes: Lookahead) -> None:
        self.num_together, self.warm_up_steps = sizes.num_drafts, sizes.ngram
        self._sizes = sizes
        self._drafted: dict[int, _Drafted] = {}  # by sequence id
        self._pools: dict[str, Pool] = {}  # by request id

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """N-grams first, then the window by columns: of less than asked for, what comes first is of use."""
        drafted = self._drafted.get(sequence.sequence_id) or self._begin(request, sequence)
        stop = min(len(sequence.token_ids), drafted.num_taken + AT_ONCE)
        drafted.pool.take(sequence.token_ids, drafted.num_taken, stop)
        drafted.num_taken = stop
        drafted.window.move()
        places: Places = {}
        for path in (*drafted.pool.behind(sequence.token_ids[-1]), *drafted.window.paths()):
            _add(path, places, num_drafts)
        return Draft(
            tuple(token_id for _, token_id in places), tuple(parent for parent, _ in places)
        )

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        for row, token_ids in verified_rows(plan, result):
            draft = Draft(row.token_ids[1:], tuple(parent - 1 for parent in row.parents))
            self.drawn(row.sequence_id, row.start + 1, draft, token_ids)

    def drawn(
        self, sequence_id: int, num_known_tokens: int, draft: Draft, token_ids: TokenIds[int]
    ) -> None:
        """token_ids: drawn behind the last known token, and behind each draft. Negative: nothing could be drawn there."""
        drafted = self._drafted.get(sequence_id)
        if drafted is None or drafted.window.num_known != num_known_tokens:
            return  # it has ended, or others drafted
        places = {
            key: place for place, key in enumerate(zip(draft.parents, draft.token_ids, strict=True))
        }
        ends = (_follow(path, places) for path in drafted.window.paths())
        behind = [None if end is None else token_ids[1 + end] for end in ends]
        drafted.window.hear(
            (each if each is not None and each >= 0 else None for each in behind), drafted.pool
        )

    def forget(self, group: SequenceGroup) -> None:
        self._pools.pop(group.request.request_id, None)
        for sequence_id in group.sequence_ids:
            self._drafted.pop(sequence_id, None)

    def _begin(self, request: Request, sequence: Sequence) -> _Drafted:
        sizes, pool = self._sizes, self._pools.get(request.request_id)
        # the first of the samples takes in the prompt
        num_taken = sequence.num_prompt_tokens if pool else 0
        pool = pool or self._pools.setdefault(request.request_id, Pool(sizes.ngram, sizes.guesses))
        drafted = _Drafted(Window(sizes, sequence.token_ids), pool, num_taken)
        self._drafted[sequence.sequence_id] = drafted
        return drafted


def _add(path: Iterable[int], places: Places, most: int) -> None:
    """As much of a path as there is room for; what is there already stands for both."""
    place = -1
    for token_id in path:
        key = place, token_id
        if key not in places:
            if len(places) == most:
                return
            places[key] = len(places)
        place = places[key]


def _follow(path: Iterable[int], places: Mapping[tuple[int, int], int]) -> int | None:
    """The place of the last token; -1: of an empty path."""
    place = -1
    for token_id in path:
        if (place := places.get((place, token_id), -2)) < -1:
            return None
    return place
