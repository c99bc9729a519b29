"""Finds stop strings in text that comes in pieces, and holds back what could still become one."""

from __future__ import annotations


class StopStrings:
    """Cuts a stream of text at the stop string that is complete first; of several that end there, the longest.

    Where the pieces begin and end makes no difference to the text that comes out, only to when it does.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        """`include`: the stop string belongs to the text; then nothing has to be held back."""
        self._stops = stops
        self._include = include
        # characters of the past that a stop string may begin in
        self._reach = max(map(len, stops), default=1) - 1
        self._recent = ""  # the last `reach` characters
        self._num_held = 0  # how many of them have not come out

    def push(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Takes the next piece; returns the text that may be shown now, and the stop string that ended it, if any.

        With `may_stop` false a stop string that is complete within this piece counts as text.
        """
        if not self._stops:
            return piece, None
        text = self._recent + piece
        shown = len(self._recent) - self._num_held
        found = self._find(text) if may_stop else None
        if found is not None:
            end, start, stop = found
            return text[shown : end if self._include else start], stop
        self._num_held = 0 if self._include else self._num_to_hold(text)
        self._recent = text[-self._reach :] if self._reach else ""
        return text[shown : len(text) - self._num_held], None

    def flush(self) -> str:
        """What is held back, to be shown because no more text comes."""
        held = self._recent[len(self._recent) - self._num_held :]
        self._num_held = 0
        return held

    def _find(self, text: str) -> tuple[int, int, str] | None:
        """(end, start, stop string) of the first to end behind the recent text."""
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._recent) + 1 - len(stop)))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found, default=None)

    def _num_to_hold(self, text: str) -> int:
        """Length of the longest end of the text that a stop string could begin with."""
        for num_held in range(min(self._reach, len(text)), 0, -1):
            end = text[-num_held:]
            if any(len(stop) > num_held and stop.startswith(end) for stop in self._stops):
                return num_held
        return 0
