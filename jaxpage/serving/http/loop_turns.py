"""Divides the turns of the event loop among the streams, so that no turn takes long.

A chunk of a stream is made on the event loop. Each delta is small, but hundreds of streams may have
one in the same turn, and everybody else waits until all of them are encoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from jaxpage.outputs import RequestOutput

MAX_ENTRIES = 2048  # tokens and log probabilities that are encoded in one turn: some milliseconds
Deltas = Sequence[tuple[int, RequestOutput]]


class LoopTurns:
    """Lets the streams of an event loop encode a bounded number of entries in each of its turns."""

    def __init__(self) -> None:
        self._num_taken = 0  # the entries of this turn

    async def take(self, number: int) -> None:
        """Waits for a turn that has room for so many entries.

        A turn in which nothing was encoded has room for any number.
        """
        while self._num_taken and self._num_taken + number > MAX_ENTRIES:
            await asyncio.sleep(0)
        if not self._num_taken:
            # Runs first in the next turn, before the streams that wait.
            asyncio.get_running_loop().call_soon(self._begin)
        self._num_taken += number

    def _begin(self) -> None:
        self._num_taken = 0


def num_entries(delta: RequestOutput) -> int:
    """Returns how many tokens and log probabilities a delta has, at least 1."""
    number = 1 + sum(map(len, filter(None, delta.prompt_logprobs or ())))
    for output in delta.outputs:
        number += len(output.token_ids)
        number += sum(map(len, filter(None, output.logprobs or ())))
    return number


def portions(deltas: Deltas) -> Iterator[tuple[int, Deltas]]:
    """Yields the deltas in groups, each with the number of its entries.

    A group has at most `MAX_ENTRIES`, or one delta.
    """
    group: list[tuple[int, RequestOutput]] = []
    total = 0
    for index, delta in deltas:
        number = num_entries(delta)
        if group and total + number > MAX_ENTRIES:
            yield total, group
            group = []
            total = 0
        group.append((index, delta))
        total += number
    if group:
        yield total, group
