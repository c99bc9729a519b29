"""Finds stop strings in text that comes in pieces, and holds back what could still become one."""

from __future__ import annotations


class StopStrings:
    """Cuts a stream of text at the stop string that is complete first.

    Of several stop strings that end at the same character the longest counts. The borders of the
    pieces have no influence on the text that comes out, only on when it comes out.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        """Starts with an empty text.

        Args:
            stops: The stop strings.
            include: True if the stop string belongs to the text; then nothing has to be held back.
        """
        self._stops = stops
        self._include = include
        # A stop string may begin this many characters before a piece.
        self._reach = max(map(len, stops), default=1) - 1
        self._recent = ""  # the last `reach` characters
        self._num_held = 0  # how many of them are held back

    def push(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Takes the next piece of the text.

        Args:
            piece: The piece.
            may_stop: False if a stop string that is complete within this piece counts as ordinary
                text.

        Returns:
            The text that may be shown now, and the stop string that ended the text, or None.
        """
        if not self._stops:
            return piece, None
        text = self._recent + piece
        shown = len(self._recent) - self._num_held
        match = self._find(text) if may_stop else None
        if match is not None:
            end, start, stop = match
            return text[shown : end if self._include else start], stop
        self._num_held = 0 if self._include else self._num_to_hold(text)
        self._recent = text[-self._reach :] if self._reach else ""
        return text[shown : len(text) - self._num_held], None

    def flush(self) -> str:
        """Returns the text that is held back, because no more text comes."""
        held = self._recent[len(self._recent) - self._num_held :]
        self._num_held = 0
        return held

    def _find(self, text: str) -> tuple[int, int, str] | None:
        """Returns (end, start, stop string) of the first one that ends in the new text, or None."""
        stops = []
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._recent) + 1 - len(stop)))
            if start >= 0:
                stops.append((start + len(stop), start, stop))
        # Of two with the same end, that with the smaller start is the longer one.
        return min(stops, default=None)

    def _num_to_hold(self, text: str) -> int:
        """Returns how long the longest end of the text is with which a stop string begins."""
        for num_held in range(min(self._reach, len(text)), 0, -1):
            end = text[-num_held:]
            if any(len(stop) > num_held and stop.startswith(end) for stop in self._stops):
                return num_held
        return 0
