"""The requests that wait: first come, first served; what was preempted stands in front, since it came before all others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from jaxpage.request import SequenceGroup


class FirstComeQueue:
    """Groups in order of arrival. Every operation takes constant time, removal from the middle included."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, SequenceGroup] = OrderedDict()

    def add(self, group: SequenceGroup) -> None:
        """A newcomer, behind all others."""
        self._groups[group.request.request_id] = group

    def put_back(self, group: SequenceGroup) -> None:
        """A preempted group, before all others: put back the newest first."""
        self.add(group)
        self._groups.move_to_end(group.request.request_id, last=False)

    def first(self) -> SequenceGroup | None:
        """The group to be admitted next; it stays in the queue."""
        return next(iter(self._groups.values()), None)

    def remove(self, request_id: str) -> None:
        del self._groups[request_id]

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)
