"""Names the parts of a chat answer: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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


@dataclass
class ReasoningPlaces:
    """Says where in the text of an answer its reasoning is, as far as that is certain.

    It is what stands between the markers, with the white space next to them.

    Attributes:
        begins: Where each part of the reasoning begins, in characters of the answer, in order.
        ends: Where each part ends.
        is_over: True if no more can follow.
    """

    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    is_over: bool = False

    def begin(self, position: int) -> None:
        """Begins a part, which is empty."""
        self.begins.append(position)
        self.ends.append(position)

    def extend(self, num_characters: int) -> None:
        """Makes the last part longer."""
        self.ends[-1] += num_characters


class PieceParser(Protocol):
    """Reads the text of one answer.

    The pieces put together are the same however the text is cut. The time is linear in the text.

    Attributes:
        reasoning: Where the reasoning is in the text.
    """

    reasoning: ReasoningPlaces

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

    def __init__(self) -> None:
        self.reasoning = ReasoningPlaces(is_over=True)

    def push(self, text: str) -> Iterator[AnswerPiece]:
        """Yields the pieces that are certain with this text."""
        if text:
            yield AnswerPiece("content", text)

    def finish(self) -> Iterator[AnswerPiece]:
        """Yields the remaining pieces."""
        return iter(())
