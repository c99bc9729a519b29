"""Divides the text of a chat answer, as it comes, into content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol


class Piece(NamedTuple):
    """A part of an answer.

    Attributes:
        kind: The kind of the part. A "call" brings the name of the tool, and "arguments" pieces
            continue the arguments of the call before them.
        text: The text; for a call its arguments so far.
        name: The name of the tool, for a call.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    name: str = ""


class PieceParser(Protocol):
    """Reads the text of one answer.

    The pieces put together are the same however the text is cut. The time is linear in the text.
    """

    def push(self, text: str) -> Iterator[Piece]:
        """Yields the pieces that are certain with this text; exhaust it before the next call.

        Text that could still become a mark is held back.
        """
        ...

    def finish(self) -> Iterator[Piece]:
        """Yields the remaining pieces, when no more text comes."""
        ...


class Plain:
    """Takes all text for content."""

    def push(self, text: str) -> Iterator[Piece]:
        """Yields the pieces that are certain with this text."""
        if text:
            yield Piece("content", text)

    def finish(self) -> Iterator[Piece]:
        """Yields the remaining pieces."""
        return iter(())


def held_back(text: str, mark: str) -> int:
    """Returns how many of the last characters could be the beginning of a mark.

    The mark is not in the text, and the mark's first character occurs in it only once.
    """
    begin = text.rfind(mark[0])
    return len(text) - begin if begin >= 0 and mark.startswith(text[begin:]) else 0


class Thinking:
    """Reads the reasoning in <think> and </think> at the beginning of an answer.

    The text after it is read by another parser.
    """

    OPEN = "<think>"
    CLOSE = "</think>"

    def __init__(self, rest: PieceParser, *, is_open: bool) -> None:
        """Makes the parser of an answer.

        Args:
            rest: The parser of the text after the reasoning.
            is_open: True if the prompt already ends with the opening mark.
        """
        self._rest = rest
        self._state: Literal["before", "inside", "after"] = "inside" if is_open else "before"
        self._space: list[str] = []  # the white space at the beginning
        self._held = ""  # text that may be the beginning of a mark

    def push(self, text: str) -> Iterator[Piece]:
        """Yields the pieces that are certain with this text."""
        if self._state == "before":
            begun = self._held + (text if self._held else text.lstrip())
            self._space.append(text[: len(self._held) + len(text) - len(begun)])
            if self.OPEN.startswith(begun) and begun != self.OPEN:
                self._held = begun
                return
            self._held = ""
            if begun.startswith(self.OPEN):
                self._state = "inside"
                text = begun[len(self.OPEN) :]
            else:
                self._state = "after"
                text = "".join(self._space) + begun
        if self._state == "inside":
            text = self._held + text
            self._held = ""
            end = text.find(self.CLOSE)
            if end < 0:
                certain = len(text) - held_back(text, self.CLOSE)
                self._held = text[certain:]
                text = text[:certain]
                if text:
                    yield Piece("reasoning", text)
                return
            if end:
                yield Piece("reasoning", text[:end])
            self._state = "after"
            text = text[end + len(self.CLOSE) :]
        yield from self._rest.push(text)

    def finish(self) -> Iterator[Piece]:
        """Yields the remaining pieces."""
        if self._state == "before":
            yield from self._rest.push("".join(self._space) + self._held)
        elif self._held:
            yield Piece("reasoning", self._held)
        yield from self._rest.finish()
