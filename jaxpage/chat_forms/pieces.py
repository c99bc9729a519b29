"""Names the parts of a chat answer: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol

TextKind = Literal["content", "reasoning"]


class AnswerPiece(NamedTuple):
    """A part of an answer.

    Attributes:
        kind: The kind of the part. A "call" brings the name of the tool, and "arguments" pieces
            continue the arguments of the call before them.
        text: The text; for a call its arguments so far, as JSON.
        name: The name of the tool, for a call.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    name: str = ""


class PieceParser(Protocol):
    """Reads the text of one answer.

    The pieces put together are the same however the text is cut. The time is linear in the text.
    """

    def push(self, text: str) -> Iterator[AnswerPiece]:
        """Yields the pieces that are certain with this text; exhaust it before the next call.

        Text that could still become a marker is held back.
        """
        ...

    def finish(self) -> Iterator[AnswerPiece]:
        """Yields the remaining pieces, when no more text comes."""
        ...


class Plain:
    """Takes all text for content."""

    def push(self, text: str) -> Iterator[AnswerPiece]:
        """Yields the pieces that are certain with this text."""
        if text:
            yield AnswerPiece("content", text)

    def finish(self) -> Iterator[AnswerPiece]:
        """Yields the remaining pieces."""
        return iter(())
