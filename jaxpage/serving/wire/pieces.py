"""What a chat answer is made of, as its text comes: content, reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol


class Piece(NamedTuple):
    """Some more of an answer. A call comes with its name, and `arguments` pieces go on with the arguments of the call before."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    name: str = ""


class PieceParser(Protocol):
    """Reads the text of one answer. However the text is cut, the pieces put together are the same; the time is linear in it."""

    def push(self, text: str) -> Iterator[Piece]:
        """What is certain with this text. What could still become a mark is held back. Exhaust it before the next call."""
        ...

    def finish(self) -> Iterator[Piece]:
        """The rest, when no more text comes."""
        ...


class Plain:
    """Text that is nothing but content."""

    def push(self, text: str) -> Iterator[Piece]:
        if text:
            yield Piece("content", text)

    def finish(self) -> Iterator[Piece]:
        return iter(())


def held_back(text: str, mark: str) -> int:
    """How many of the last characters could be the beginning of a mark that is not in the text. Its first character comes once."""
    begin = text.rfind(mark[0])
    return len(text) - begin if begin >= 0 and mark.startswith(text[begin:]) else 0


class Thinking:
    """Reasoning in <think> and </think> at the beginning of an answer; what is behind it is for another parser."""

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self, rest: PieceParser, *, is_open: bool) -> None:
        """is_open: the prompt ends with the opening mark already."""
        self._rest = rest
        self._state: Literal["before", "inside", "behind"] = "inside" if is_open else "before"
        self._space: list[str] = []  # before all
        self._held = ""  # the beginning of a mark, perhaps

    def push(self, text: str) -> Iterator[Piece]:
        if self._state == "before":
            begun = self._held + (text if self._held else text.lstrip())
            self._space.append(text[: len(self._held) + len(text) - len(begun)])
            if self.OPEN.startswith(begun) and begun != self.OPEN:
                self._held = begun
                return
            self._held = ""
            if begun.startswith(self.OPEN):
                self._state, text = "inside", begun[len(self.OPEN) :]
            else:
                self._state, text = "behind", "".join(self._space) + begun
        if self._state == "inside":
            text, self._held = self._held + text, ""
            end = text.find(self.CLOSE)
            if end < 0:
                certain = len(text) - held_back(text, self.CLOSE)
                text, self._held = text[:certain], text[certain:]
                if text:
                    yield Piece("reasoning", text)
                return
            if end:
                yield Piece("reasoning", text[:end])
            self._state, text = "behind", text[end + len(self.CLOSE) :]
        yield from self._rest.push(text)

    def finish(self) -> Iterator[Piece]:
        if self._state == "before":
            yield from self._rest.push("".join(self._space) + self._held)
        elif self._held:
            yield Piece("reasoning", self._held)
        yield from self._rest.finish()
