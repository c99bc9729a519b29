"""Breaks streamed text between words at the edge of a terminal."""

from __future__ import annotations

import re

from wcwidth import wcwidth

_PIECES = re.compile(r"\n|[^\S\n]+|\S+")


class Wrapper:
    """Breaks lines of a stream before the word that would not fit.

    A word is held back until its end is known, so the printed text lags by at most one word.

    Args:
        width: The columns of the terminal; a word that is wider is left to the terminal.
        column: The column of the cursor.
    """

    def __init__(self, width: int, column: int = 0) -> None:
        self._width = width
        self._column = column
        self._word = ""

    def feed(self, text: str) -> str:
        """Returns what can be printed now."""
        pieces = _PIECES.findall(self._word + text)
        # The next text may go on with the last word, whose width is not known yet.
        self._word = pieces.pop() if pieces and not pieces[-1].isspace() else ""
        return "".join(map(self._place, pieces))

    def finish(self) -> str:
        """Returns the word that was held back."""
        word = self._word
        self._word = ""
        return self._place(word)

    def _place(self, piece: str) -> str:
        if piece == "\n":
            self._column = 0
            return piece
        # wcwidth gives -1 for control characters, which move no cursor.
        width = sum(max(0, wcwidth(character)) for character in piece)
        if self._column and not piece.isspace() and self._column + width > self._width:
            self._column = width
            return f"\n{piece}"
        self._column += width
        return piece
