"""Holds the scheduling policies: which request is admitted next, and which is preempted first."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from jaxpage.step.request import SequenceGroup

Rank = tuple[int, int]


class WaitingQueue(Protocol):
    """The requests that wait, under one policy.

    The time of an operation grows at most with the logarithm of the number of waiting requests.
    """

    def rank(self, group: SequenceGroup) -> Rank:
        """Returns the rank of a group, which does not change while the group runs.

        The running group that ranks first, with the least value, is never preempted; the one that
        ranks last is preempted first.
        """

    def add(self, group: SequenceGroup) -> None:
        """Takes in a new group."""

    def put_back(self, group: SequenceGroup) -> None:
        """Takes a preempted group back; of several the one that ranks last comes first."""

    def first(self) -> SequenceGroup | None:
        """Returns the group that is to be admitted next; it stays in the queue."""

    def remove(self, group: SequenceGroup) -> None:
        """Lets go of a group that was admitted or has ended."""

    def admitted(self, group: SequenceGroup, num_tokens: int) -> None:
        """Notes that a new group was admitted with this many tokens of its prompt to compute."""

    def served(self, group: SequenceGroup, num_tokens: int) -> None:
        """Notes that a group was given this many tokens of output."""

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Returns all groups in the order of admission, as far as that is settled."""

    def __len__(self) -> int:
        """Returns how many groups wait."""


class FirstCome:
    """First come, first served.

    The group that arrived first is admitted first, and the last to arrive is preempted first.
    """

    def __init__(self) -> None:
        """Makes an empty queue."""
        self._groups: OrderedDict[str, SequenceGroup] = OrderedDict()  # the key is a request id

    def rank(self, group: SequenceGroup) -> Rank:
        """Returns a rank that grows with the arrival."""
        return 0, group.arrival

    def add(self, group: SequenceGroup) -> None:
        """Puts a new group at the end."""
        self._groups[group.request.request_id] = group

    def put_back(self, group: SequenceGroup) -> None:
        """Puts a preempted group at the front: it arrived before all that wait."""
        self.add(group)
        self._groups.move_to_end(group.request.request_id, last=False)

    def first(self) -> SequenceGroup | None:
        """Returns the group at the front."""
        return next(iter(self._groups.values()), None)

    def remove(self, group: SequenceGroup) -> None:
        """Takes a group out, wherever it is."""
        del self._groups[group.request.request_id]

    def admitted(self, group: SequenceGroup, num_tokens: int) -> None:
        """Does nothing: this policy counts no tokens."""

    def served(self, group: SequenceGroup, num_tokens: int) -> None:
        """Does nothing: this policy counts no tokens."""

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Returns the groups from the front to the end."""
        return iter(self._groups.values())

    def __len__(self) -> int:
        """Returns how many groups wait."""
        return len(self._groups)


class ByPriority(FirstCome):
    """The lowest `priority` first, and the first arrival among equals.

    New and preempted requests are treated alike, and running requests are preempted in the opposite
    order. A waiting request does not take the place of a running one: it is the next to be admitted
    when there is room.
    """

    def __init__(self) -> None:
        """Makes an empty queue."""
        super().__init__()
        # An entry for each waiting group, and some for groups that do not wait any more.
        self._heap: list[tuple[Rank, str]] = []

    def rank(self, group: SequenceGroup) -> Rank:
        """Returns a rank that grows with the priority's number, then with the arrival."""
        return group.request.params.priority, group.arrival

    def add(self, group: SequenceGroup) -> None:
        """Puts a group, new or preempted, at its rank."""
        super().add(group)
        heapq.heappush(self._heap, (self.rank(group), group.request.request_id))

    put_back = add

    def first(self) -> SequenceGroup | None:
        """Returns the waiting group that ranks first."""
        while self._heap:
            rank, request_id = self._heap[0]
            group = self._groups.get(request_id)
            # A group that has ended leaves its entry, and its id may be that of another one by now.
            if group is not None and self.rank(group) == rank:
                return group
            heapq.heappop(self._heap)
        return None

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Returns the groups in order of rank."""
        return iter(sorted(self._groups.values(), key=self.rank))


class FairShare:
    """Gives every user the same share of the tokens, as far as the user asks for it.

    The policy is the virtual token counter (Sheng et al., OSDI 2024). A user's counter grows by one
    for each token of a prompt that is computed, and by two for each token that is drawn. The next
    request is the first one of the waiting user with the lowest counter. A user who comes back
    after a pause starts no lower than the waiting users do, so that no share can be saved for
    later.

    Preempted requests come before new ones, in the order of their first admission. That order also
    decides which running request is preempted. All requests without a user count as one user's.
    """

    PROMPT_WEIGHT = 1
    OUTPUT_WEIGHT = 2
    MAX_IDLE = 1024  # users whose counters are remembered while none of their requests waits

    def __init__(self) -> None:
        """Makes an empty queue."""
        self._preempted = FirstCome()
        self._waiting: dict[str, OrderedDict[str, SequenceGroup]] = {}  # by user; none is empty
        self._counters: dict[str, int] = {}  # the counters of the users in `_waiting`
        self._idle: OrderedDict[str, int] = OrderedDict()  # the counters of other users
        # The arrival of each waiting user's entry in the heap; an entry with another one is old.
        self._turns: dict[str, int] = {}
        # (counter, turn, user); the counter may have grown since.
        self._heap: list[tuple[int, int, str]] = []
        # The counter of the user who was admitted last: a user starts there when no other waits.
        self._level = 0
        self._num_waiting = 0

    def rank(self, group: SequenceGroup) -> Rank:
        """Returns a rank that grows with the first admission."""
        return 0, group.admission

    def add(self, group: SequenceGroup) -> None:
        """Puts a new group at the end of its user's requests."""
        user = _user(group)
        if user not in self._waiting:
            lowest = self._lowest()
            floor = self._level if lowest is None else self._counters[lowest]
            self._counters[user] = max(self._idle.pop(user, 0), floor)
            self._waiting[user] = OrderedDict()
            self._turns[user] = group.arrival
            heapq.heappush(self._heap, (self._counters[user], group.arrival, user))
        self._waiting[user][group.request.request_id] = group
        self._num_waiting += 1

    def put_back(self, group: SequenceGroup) -> None:
        """Puts a preempted group before all others."""
        self._preempted.put_back(group)

    def first(self) -> SequenceGroup | None:
        """Returns a preempted group, or the first group of the user with the lowest counter."""
        if (preempted := self._preempted.first()) is not None:
            return preempted
        lowest = self._lowest()
        return None if lowest is None else next(iter(self._waiting[lowest].values()))

    def _lowest(self) -> str | None:
        """Returns the waiting user with the lowest counter; of equals the one who waits longest."""
        while self._heap:
            counter, turn, user = self._heap[0]
            if self._turns.get(user) != turn:
                heapq.heappop(self._heap)  # the user has stopped waiting since
            elif counter < self._counters[user]:
                heapq.heapreplace(self._heap, (self._counters[user], turn, user))
            else:
                return user
        return None

    def remove(self, group: SequenceGroup) -> None:
        """Takes a group out; a user without waiting groups becomes idle."""
        # It came back by `put_back`, and waits among the preempted ones.
        if group.num_preemptions:
            self._preempted.remove(group)
            return
        user = _user(group)
        del self._waiting[user][group.request.request_id]
        self._num_waiting -= 1
        if not self._waiting[user]:
            del self._waiting[user]
            del self._turns[user]
            self._idle[user] = self._counters.pop(user)
            if len(self._idle) > self.MAX_IDLE:
                self._idle.popitem(last=False)

    def admitted(self, group: SequenceGroup, num_tokens: int) -> None:
        """Counts the tokens of a prompt."""
        counters, user = self._counters_of(group)
        self._level = max(self._level, counters[user])
        counters[user] += self.PROMPT_WEIGHT * num_tokens

    def served(self, group: SequenceGroup, num_tokens: int) -> None:
        """Counts tokens of output."""
        counters, user = self._counters_of(group)
        counters[user] += self.OUTPUT_WEIGHT * num_tokens

    def _counters_of(self, group: SequenceGroup) -> tuple[dict[str, int], str]:
        """Returns the dictionary that has the counter of a group's user, and the user."""
        user = _user(group)
        if user in self._counters:
            return self._counters, user
        # The counter was forgotten; see `MAX_IDLE`.
        self._idle.setdefault(user, self._level)
        return self._idle, user

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Returns the preempted groups, then those of each user, the lowest counter first."""
        yield from self._preempted
        users = sorted(self._waiting, key=lambda user: (self._counters[user], self._turns[user]))
        for user in users:
            yield from self._waiting[user].values()

    def __len__(self) -> int:
        """Returns how many groups wait."""
        return len(self._preempted) + self._num_waiting


def _user(group: SequenceGroup) -> str:
    return group.request.params.user or ""


POLICIES: dict[str, Callable[[], WaitingQueue]] = {
    "fcfs": FirstCome,
    "priority": ByPriority,
    "fair": FairShare,
}
