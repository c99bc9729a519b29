"""The policies: in which order waiting requests are admitted, and in which order running ones are preempted."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from jaxpage.step.request import SequenceGroup

Rank = tuple[int, int]


class WaitingQueue(Protocol):
    """The requests that wait, under one policy. No operation takes longer because many wait, but for a logarithm."""

    def rank(self, group: SequenceGroup) -> Rank:
        """Of running groups the lowest is never preempted, the highest first. It does not change while a group runs."""

    def add(self, group: SequenceGroup) -> None:
        """A newcomer."""

    def put_back(self, group: SequenceGroup) -> None:
        """A preempted group; of several, the one with the highest rank comes first."""

    def first(self) -> SequenceGroup | None:
        """The group to be admitted next; it stays in the queue."""

    def remove(self, group: SequenceGroup) -> None:
        """It was admitted, or has ended."""

    def admitted(self, group: SequenceGroup, num_tokens: int) -> None:
        """A newcomer was admitted, with so many tokens of its prompt to compute."""

    def served(self, group: SequenceGroup, num_tokens: int) -> None:
        """A group was given so many tokens of output."""

    def __iter__(self) -> Iterator[SequenceGroup]:
        """All groups, the next to be admitted first, as far as that is settled."""

    def __len__(self) -> int: ...


class FirstCome:
    """First come, first served: arrival decides who is admitted, and the latest is preempted first."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, SequenceGroup] = OrderedDict()

    def rank(self, group: SequenceGroup) -> Rank:
        return 0, group.arrival

    def add(self, group: SequenceGroup) -> None:
        self._groups[group.request.request_id] = group

    def put_back(self, group: SequenceGroup) -> None:
        self.add(group)
        self._groups.move_to_end(group.request.request_id, last=False)  # it came before all that wait

    def first(self) -> SequenceGroup | None:
        return next(iter(self._groups.values()), None)

    def remove(self, group: SequenceGroup) -> None:
        del self._groups[group.request.request_id]

    def admitted(self, group: SequenceGroup, num_tokens: int) -> None:
        pass

    def served(self, group: SequenceGroup, num_tokens: int) -> None:
        pass

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)


class ByPriority(FirstCome):
    """The lowest `priority` first, arrival among equals, whether new or preempted; running requests are preempted in the opposite order.

    A waiting request takes no running one's place: it is next when there is room.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[Rank, str]] = []  # of those that wait, and some that do so no more

    def rank(self, group: SequenceGroup) -> Rank:
        return group.request.params.priority, group.arrival

    def add(self, group: SequenceGroup) -> None:
        super().add(group)
        heapq.heappush(self._heap, (self.rank(group), group.request.request_id))

    put_back = add

    def first(self) -> SequenceGroup | None:
        while self._heap:
            rank, request_id = self._heap[0]
            group = self._groups.get(request_id)
            if group is not None and self.rank(group) == rank:
                return group
            heapq.heappop(self._heap)
        return None

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(sorted(self._groups.values(), key=self.rank))


class FairShare:
    """Every user gets the same share of the tokens, as far as they ask for it: virtual token counters (Sheng et al., OSDI 2024).

    A user's counter grows with the tokens of prompts that are computed and, twice as much, with the tokens that are drawn. Next is the
    first request of the waiting user whose counter is lowest. A user who comes back after a pause starts no lower than the waiting users,
    so that no share can be saved for later. Preempted requests come before new ones, in the order in which they were first admitted;
    that order also decides which is preempted. Requests without a user count as one user's.
    """

    PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
    MOST_IDLE = 1024  # users whose counters are remembered while none of their requests waits

    def __init__(self) -> None:
        self._preempted = FirstCome()
        self._waiting: dict[str, OrderedDict[str, SequenceGroup]] = {}  # by user; never empty
        self._counters: dict[str, int] = {}  # of those users
        self._idle: OrderedDict[str, int] = OrderedDict()  # the counters of the others
        self._turns: dict[str, int] = {}  # of each waiting user: the arrival with which its entry in the heap was made
        self._heap: list[tuple[int, int, str]] = []  # (counter, no higher than it is now; turn; user)
        self._level = 0  # the counter of the user who was admitted last: where a user starts when no other waits
        self._num_waiting = 0

    def rank(self, group: SequenceGroup) -> Rank:
        return 0, group.admission

    def add(self, group: SequenceGroup) -> None:
        user = _user(group)
        if user not in self._waiting:
            lowest = self._lowest()
            floor = self._level if lowest is None else self._counters[lowest]
            self._counters[user] = max(self._idle.pop(user, 0), floor)
            self._waiting[user], self._turns[user] = OrderedDict(), group.arrival
            heapq.heappush(self._heap, (self._counters[user], group.arrival, user))
        self._waiting[user][group.request.request_id] = group
        self._num_waiting += 1

    def put_back(self, group: SequenceGroup) -> None:
        self._preempted.put_back(group)

    def first(self) -> SequenceGroup | None:
        if (preempted := self._preempted.first()) is not None:
            return preempted
        lowest = self._lowest()
        return None if lowest is None else next(iter(self._waiting[lowest].values()))

    def _lowest(self) -> str | None:
        """The waiting user with the lowest counter; of equals, the one that has waited longest."""
        while self._heap:
            counter, turn, user = self._heap[0]
            if self._turns.get(user) != turn:
                heapq.heappop(self._heap)  # it has stopped waiting since
            elif counter < self._counters[user]:
                heapq.heapreplace(self._heap, (self._counters[user], turn, user))
            else:
                return user
        return None

    def remove(self, group: SequenceGroup) -> None:
        user, request_id = _user(group), group.request.request_id
        if group.num_preemptions:
            self._preempted.remove(group)
            return
        del self._waiting[user][request_id]
        self._num_waiting -= 1
        if not self._waiting[user]:
            del self._waiting[user], self._turns[user]
            self._idle[user] = self._counters.pop(user)
            if len(self._idle) > self.MOST_IDLE:
                self._idle.popitem(last=False)

    def admitted(self, group: SequenceGroup, num_tokens: int) -> None:
        counters, user = self._counters_of(group)
        self._level = max(self._level, counters[user])
        counters[user] += self.PROMPT_WEIGHT * num_tokens

    def served(self, group: SequenceGroup, num_tokens: int) -> None:
        counters, user = self._counters_of(group)
        counters[user] += self.OUTPUT_WEIGHT * num_tokens

    def _counters_of(self, group: SequenceGroup) -> tuple[dict[str, int], str]:
        user = _user(group)
        if user in self._counters:
            return self._counters, user
        self._idle.setdefault(user, self._level)
        return self._idle, user

    def __iter__(self) -> Iterator[SequenceGroup]:
        yield from self._preempted
        for user in sorted(self._waiting, key=lambda user: (self._counters[user], self._turns[user])):
            yield from self._waiting[user].values()

    def __len__(self) -> int:
        return len(self._preempted) + self._num_waiting


def _user(group: SequenceGroup) -> str:
    return group.request.params.user or ""


POLICIES: dict[str, Callable[[], WaitingQueue]] = {"fcfs": FirstCome, "priority": ByPriority, "fair": FairShare}
