"""Drafts by lookahead decoding: the model makes drafts itself while it verifies others.

With the text a window of guesses is verified (Fu et al. 2024, arXiv:2402.02057). What is drawn
after guesses are better guesses (a Jacobi iteration), and what came out of one column of the window
step by step is an n-gram that the model may well write. N-grams that begin with the last known
token are drafts. Window and n-grams make one tree, so that a guess which happens to be right is a
token like any other.

Draws are coupled: their noise goes by position, in the window as in the text, so the iteration
approaches the text at any temperature.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

from jaxpage.settings.draft_settings import Lookahead
from jaxpage.speculation.proposal import Proposer, iterate_verified_rows
from jaxpage.step.draft import Draft
from jaxpage.step.plan import StepPlan, StepResult
from jaxpage.step.request import Request, Sequence, SequenceGroup

# Tokens that are taken in when a sequence is asked: a millisecond. Long prompts take several steps.
AT_ONCE = 512
MAX_KEYS = 1 << 14  # a pool takes some 20 MB if all are used

Places = dict[tuple[int, int], int]  # in a draft, by the place before (-1: none) and the token


class Pool:
    """Holds n-grams by their first token: the latest few of each token."""

    def __init__(self, length: int, maximum: int, max_keys: int = MAX_KEYS) -> None:
        """Makes an empty pool.

        Args:
            length: The length of an n-gram, at least 2.
            maximum: The most n-grams that begin with a token. The one that was added or met again
                longest ago gives way.
            max_keys: The most first tokens; the same goes for them.
        """
        self._length = length
        self._maximum = maximum
        self._max_keys = max_keys
        # The latest come last.
        self._tails: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, token_id: int, tail: tuple[int, ...]) -> None:
        """Adds an n-gram, or makes a known one the latest."""
        tails = self._tails.setdefault(token_id, OrderedDict())
        tails[tail] = None
        tails.move_to_end(tail)
        if len(tails) > self._maximum:
            tails.popitem(last=False)
        self._tails.move_to_end(token_id)
        if len(self._tails) > self._max_keys:
            self._tails.popitem(last=False)

    def take(self, token_ids: TokenIds[int], start: int, stop: int) -> None:
        """Adds the n-grams of a text whose last token is at `start` or later, and before `stop`."""
        for end in range(max(start, self._length - 1), stop):
            begin = end + 1 - self._length
            self.add(token_ids[begin], tuple(token_ids[begin + 1 : end + 1]))

    def after(self, token_id: int) -> Iterable[tuple[int, ...]]:
        """Returns what followed a token in its n-grams, the latest first."""
        return reversed(self._tails.get(token_id, OrderedDict()))


class Window:
    """Holds guesses of the tokens after a text.

    The guess of row r in column c is for the place r + c after the last known token. Row 0, a
    chain, begins with that token itself. Every later guess was drawn after the one above it in its
    column, and before its column comes what leads to it in row 0. N - 1 rows make an n-gram of each
    column with what is drawn after its last guess.
    """

    def __init__(self, sizes: Lookahead, token_ids: list[int]) -> None:
        """Begins with one row, whose guesses are tokens of the text.

        Args:
            sizes: The sizes of window and n-grams.
            token_ids: The text, which may get longer and change in no other way.
        """
        self._token_ids = token_ids
        self._max_rows = sizes.ngram - 1
        self._num_filled = 0
        self.num_known = len(token_ids)  # tokens of the text before the window
        self.rows = [[token_ids[-1], *(self._filling() for _ in range(sizes.window - 1))]]

    def move(self) -> None:
        """Moves the window to the end of the text as it is now."""
        self._drop(len(self._token_ids) - self.num_known)
        self.num_known = len(self._token_ids)
        self.rows[0][0] = self._token_ids[-1]

    def paths(self) -> Iterable[tuple[int, ...]]:
        """Yields for each column the guesses after the last known token, down to its last one."""
        for column in range(len(self.rows[0])):
            yield (*self.rows[0][1 : column + 1], *(row[column] for row in self.rows[1:]))

    def hear(self, drawn: Iterable[int | None], pool: Pool) -> None:
        """Takes in what was drawn after each of the paths; None where that is unknown.

        One token more is known from now on.
        """
        last = self.rows[-1]
        row = list[int]()
        for column, token_id in enumerate(drawn):
            if token_id is None:  # the row before has a guess for the same place
                token_id = last[column + 1] if column + 1 < len(last) else self._filling()
            elif len(self.rows) == self._max_rows:
                first, *between = (row[column] for row in self.rows)
                pool.add(first, (*between, token_id))
            row.append(token_id)
        self.rows.append(row)
        self.num_known += 1
        # Without its first row a full window begins one place later; any other gives up a column.
        if len(self.rows) > self._max_rows:
            del self.rows[0]
        else:
            self._drop(1)

    def _drop(self, num_columns: int) -> None:
        """Gives up the first columns, whose places are known.

        New columns are, to begin with, parts of the text.
        """
        for _ in range(min(num_columns, len(self.rows[0]))):
            for row in self.rows:
                del row[0]
                row.append(self._filling())

    def _filling(self) -> int:
        """Returns the tokens of the text, one after the other and over again."""
        self._num_filled += 1
        return self._token_ids[(self._num_filled - 1) % len(self._token_ids)]


@dataclass
class _Drafted:
    """Holds the window and the n-grams of a sequence that is drafted for."""

    window: Window
    pool: Pool
    num_taken: int  # tokens of it that are in the pool


class LookaheadProposer(Proposer):
    """Drafts n-grams and a window of guesses.

    The samples of a request share their n-grams, those of the text and those that were drawn; each
    has a window of its own.
    """

    def __init__(self, sizes: Lookahead) -> None:
        self.num_together = sizes.num_drafts
        self.warm_up_steps = sizes.ngram
        self._sizes = sizes
        self._drafted: dict[int, _Drafted] = {}  # by sequence id
        self._pools: dict[str, Pool] = {}  # by request id

    def propose(self, request: Request, sequence: Sequence, num_drafts: int) -> Draft | None:
        """Drafts n-grams first, then the window by columns.

        If fewer drafts are verified than asked for, those that come first are still of use.
        """
        drafted = self._drafted.get(sequence.sequence_id) or self._begin(request, sequence)
        stop = min(len(sequence.token_ids), drafted.num_taken + AT_ONCE)
        drafted.pool.take(sequence.token_ids, drafted.num_taken, stop)
        drafted.num_taken = stop
        drafted.window.move()
        places: Places = {}
        for path in (*drafted.pool.after(sequence.token_ids[-1]), *drafted.window.paths()):
            _add(path, places, num_drafts)
        return Draft(
            tuple(token_id for _, token_id in places), tuple(parent for parent, _ in places)
        )

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in what was drawn after the drafts of a step."""
        for row, token_ids in iterate_verified_rows(plan, result):
            draft = Draft(row.token_ids[1:], tuple(parent - 1 for parent in row.parents))
            self.learn_draws(row.sequence_id, row.start + 1, draft, token_ids)

    def learn_draws(
        self, sequence_id: int, num_known_tokens: int, draft: Draft, token_ids: TokenIds[int]
    ) -> None:
        """Takes in what was drawn after the drafts of a sequence.

        Args:
            sequence_id: The sequence.
            num_known_tokens: Its known tokens when it was drafted for.
            draft: The drafts.
            token_ids: The tokens drawn after the last known token and after each draft; negative
                where nothing could be drawn.
        """
        drafted = self._drafted.get(sequence_id)
        if drafted is None or drafted.window.num_known != num_known_tokens:
            return  # it has ended, or others drafted
        places = {
            key: index for index, key in enumerate(zip(draft.parents, draft.token_ids, strict=True))
        }
        ends = (_follow(path, places) for path in drafted.window.paths())
        after = [None if end is None else token_ids[1 + end] for end in ends]
        drafted.window.hear(
            (each if each is not None and each >= 0 else None for each in after), drafted.pool
        )

    def forget(self, group: SequenceGroup) -> None:
        """Forgets a request that has ended, and its sequences."""
        self._pools.pop(group.request.request_id, None)
        for sequence_id in group.sequence_ids:
            self._drafted.pop(sequence_id, None)

    def _begin(self, request: Request, sequence: Sequence) -> _Drafted:
        sizes = self._sizes
        pool = self._pools.get(request.request_id)
        # The first of the samples takes in the prompt.
        num_taken = sequence.num_prompt_tokens if pool else 0
        pool = pool or self._pools.setdefault(request.request_id, Pool(sizes.ngram, sizes.guesses))
        drafted = _Drafted(Window(sizes, sequence.token_ids), pool, num_taken)
        self._drafted[sequence.sequence_id] = drafted
        return drafted


def _add(path: Iterable[int], places: Places, maximum: int) -> None:
    """Adds as much of a path as there is room for; what is there already is shared."""
    place = -1
    for token_id in path:
        key = place, token_id
        if key not in places:
            if len(places) == maximum:
                return
            places[key] = len(places)
        place = places[key]


def _follow(path: Iterable[int], places: Mapping[tuple[int, int], int]) -> int | None:
    """Returns the place of a path's last token: -1 for an empty path, None for an unknown one."""
    place = -1
    for token_id in path:
        if (place := places.get((place, token_id), -2)) < -1:
            return None
    return place
