"""Runs beam searches that follow the ancestry of real ones.

The model decides which beams go on, and this decides how many blocks the beams share.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpage.step.edits import Append, Drop, Edit, Finish, Fork

# For each step of a search after the first: pairs (place of a beam that is dropped, place of the
# beam that goes on twice instead).
Ancestry = Sequence[Sequence[tuple[int, int]]]


class ScriptedBeams:
    """Holds the sequences of one search.

    The ancestry begins anew if the search is longer than the real one was.
    """

    def __init__(self, sequence_ids: Sequence[int], ancestry: Ancestry) -> None:
        """Begins with one sequence, which becomes all beams when it has drawn.

        Args:
            sequence_ids: The id of the first sequence, then the ids for forks. There are twice as
                many ids as beams.
            ancestry: The beams that go on in each step.
        """
        self._beams = [sequence_ids[0]]  # the sequence id at each place
        self._free = list(reversed(sequence_ids[1:]))
        self._width = len(sequence_ids) // 2
        self._ancestry = ancestry
        self._num_steps = 0
        self._num_drawn = 0  # how many beams have drawn in this step

    def advance(self, token_id: int, *, is_last: bool) -> list[Edit]:
        """Returns the edits after a beam has drawn a token.

        Only the last draw of a step has edits: some beams are dropped, others fork, and all grow.
        """
        self._num_drawn += 1
        if self._num_drawn < len(self._beams):
            return []
        self._num_drawn = 0
        edits = self._first() if len(self._beams) < self._width else self._next()
        for sequence_id in self._beams:
            edits.append(Append(sequence_id, token_id))
            if is_last:
                edits.append(Finish(sequence_id, "length"))
        return edits

    def _first(self) -> list[Edit]:
        """Forks the first sequence into all beams."""
        self._beams += [self._free.pop() for _ in range(self._width - 1)]
        return [
            Fork(self._beams[0], child, index)
            for index, child in enumerate(self._beams[1:], start=1)
        ]

    def _next(self) -> list[Edit]:
        replaced = self._ancestry[self._num_steps % len(self._ancestry)] if self._ancestry else ()
        self._num_steps += 1
        dropped = [self._beams[place] for place, _ in replaced]
        forks: list[Edit] = []
        for place, parent in replaced:
            child = self._free.pop()
            forks.append(Fork(self._beams[parent], child, place))
            self._beams[place] = child
        self._free += dropped
        return [*(Drop(sequence_id) for sequence_id in dropped), *forks]
