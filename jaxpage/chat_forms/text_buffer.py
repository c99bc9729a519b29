"""Holds the text of an answer as it arrives, for parsers that are generators.

A parser yields where it needs more text than there is, and goes on when more has come:

    pushed "<tool"      literal("<tool_call>") yields
    pushed "_call>{"    literal("<tool_call>") returns
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from jaxpage.chat_forms.markers import (
    CALL_ID,
    CALL_INDEX,
    KEY,
    PLACEHOLDER,
    TOOL_NAME,
    any_of,
    before_placeholder,
    chunks,
    trailing_space,
)
from jaxpage.chat_forms.pieces import AnswerPiece, ReasoningPlaces

T = TypeVar("T")
Parser = Generator[None, None, T]
# The id of a call, which may contain its name and its number.
_ID = re.compile(r"[\w.:\-]+")
_MAX_CHARACTERS = (
    1 << 16
)  # characters that were read and are still held; they are removed all at once
# Characters that attempts to read calls may read in vain. Text in which more of them fail, such as
# a million opening markers without an end, has no calls from there on.
_MAX_IN_VAIN = 1 << 23


class MismatchError(Exception):
    """The text does not fit the form."""


class EndedError(MismatchError):
    """The text fits the form as far as it goes, and has ended."""


class TextBuffer:
    """Holds the text that was pushed, and the position to which it was read."""

    def __init__(self, text: str = "", *, has_ended: bool = False) -> None:
        self.text = text
        self.num_forgotten = 0  # characters that `forget` has removed
        self.position = 0
        self.reached = 0  # to which the last attempt that failed had read
        self.has_ended = has_ended

    @property
    def place(self) -> int:
        """Returns the position in the whole text."""
        return self.num_forgotten + self.position

    def push(self, text: str) -> None:
        """Appends a text.

        Python appends in place if nothing else refers to the text, so that many short texts take no
        longer than one; a parser that waits should hold no match of a pattern.
        """
        held = self.text
        self.text = ""
        held += text
        self.text = held

    def forget(self) -> None:
        """Removes what was read but its last character, if it is much; nobody may go back then."""
        if self.position > _MAX_CHARACTERS:
            self.num_forgotten += self.position - 1
            # `is_at_line` looks at the last character.
            self.text = self.text[self.position - 1 :]
            self.position = 1

    def more(self) -> Parser[None]:
        """Waits for more text.

        Raises:
            EndedError: There is no more.
        """
        if self.has_ended:
            raise EndedError
        yield

    def next_character(self) -> Parser[str]:
        """Returns the next character without reading it; empty at the end."""
        while self.position >= len(self.text) and not self.has_ended:
            yield
        return self.text[self.position : self.position + 1]

    def is_at_line(self) -> bool:
        """Returns whether a line begins here, or white space that begins one."""
        begin = self.position
        while begin > 0 and self.text[begin - 1] in " \t":
            begin -= 1
        return begin == 0 or self.text[begin - 1] == "\n"

    def skip_space(self) -> Parser[None]:
        """Reads white space."""
        while (character := (yield from self.next_character())) and character.isspace():
            self.position += 1

    def skip_trailing_space(self, marker: str) -> Parser[None]:
        """Reads the white space that a marker ends with, as far as it is there."""
        for character in trailing_space(marker):
            if (yield from self.next_character()) != character:
                return
            self.position += 1

    def literal(
        self, marker: str, name: str = "", key: str = "", *, before_value: bool = False
    ) -> Parser[None]:
        """Reads a marker, with any white space where the marker has some or could have some.

        Args:
            marker: The marker, in which placeholders stand for what differs.
            name: The text of the placeholder for the name of the tool.
            key: The text of the placeholder for the key of the argument.
            before_value: True if a bare value follows, so that white space after the marker is read
                only as far as the marker has it.

        Raises:
            MismatchError: Something else comes.
        """
        filled = marker.replace(TOOL_NAME, name).replace(KEY, key)
        for chunk in chunks(filled):
            yield from self.skip_space()
            for part in PLACEHOLDER.split(chunk):
                if part in (CALL_INDEX, CALL_ID):
                    yield from self._placeholder(part)
                else:
                    yield from self._exact(part)
        if before_value:
            yield from self.skip_trailing_space(filled)
        elif marker[-1:].isspace():
            yield from self.skip_space()

    def last_literal(self, marker: str, name: str = "") -> Parser[None]:
        """Reads a marker, or the beginning of it with which the text ends."""
        try:
            yield from self.literal(marker, name)
        except EndedError:
            self.position = len(self.text)

    def _exact(self, expected: str) -> Parser[None]:
        while not self.text.startswith(expected, self.position):
            if not expected.startswith(self.text[self.position :]):
                raise MismatchError
            yield from self.more()
        self.position += len(expected)

    def _placeholder(self, kind: str) -> Parser[None]:
        """Reads the id or the number of a call."""
        while True:
            match = _ID.match(self.text, self.position)
            if match is not None and (match.end() < len(self.text) or self.has_ended):
                break
            if match is None and self.position < len(self.text):
                raise MismatchError
            yield from self.more()
        digits = re.match(r"\d*", match[0])
        if kind == CALL_ID:
            self.position = match.end()
        elif digits is not None and digits[0]:
            self.position += digits.end()
        else:
            raise MismatchError

    def find(self, stops: tuple[str, ...], limit: float = math.inf) -> Parser[tuple[int, str]]:
        """Returns the position and the text of the first stop from here on, without reading.

        Args:
            stops: The texts to look for; of two at one position the longer is found.
            limit: The most characters before it.

        Raises:
            MismatchError: None comes within the limit, or the text has ended.
        """
        if not stops:
            raise MismatchError
        pattern = any_of(stops)
        max_characters = max(map(len, stops))
        begin = self.position
        while True:
            match = pattern.search(self.text, begin)
            if match is None:
                begin = max(self.position, len(self.text) - max_characters + 1)
            elif match.start() - self.position > limit:
                raise MismatchError
            elif self.has_ended or match.start() + max_characters <= len(self.text):
                return match.start(), match[0]
            if len(self.text) - self.position > limit + max_characters:
                raise MismatchError
            yield from self.more()

    def next_marker(
        self, markers: tuple[str, ...], emit: Callable[[str], None]
    ) -> Parser[str | None]:
        """Reads the text before the next marker, and returns the marker or None at the end.

        Args:
            markers: The markers to look for.
            emit: Takes the text as soon as it is certain that no marker begins in it.
        """
        pattern = any_of(markers)
        while True:
            match = pattern.search(self.text, self.position)
            marker = None if match is None else match[0]
            end = self._certain(markers) if match is None else match.start()
            if end > self.position:
                emit(self.text[self.position : end])
            self.position = end
            if marker is not None or self.has_ended:
                return marker
            self.forget()
            yield

    def _certain(self, markers: tuple[str, ...]) -> int:
        """Returns the position from which on the text could be the beginning of a marker."""
        if not self.has_ended:
            max_characters = max(map(len, markers), default=1) - 1
            for position in range(
                max(self.position, len(self.text) - max_characters), len(self.text)
            ):
                if any(marker.startswith(self.text[position:]) for marker in markers):
                    return position
        return len(self.text)

    def comes(self, marker: str) -> Parser[bool]:
        """Returns whether a marker comes next, up to its first placeholder, without reading it.

        It is also True if the text ends before that is certain, and for a marker without text.
        """
        begin = self.position
        try:
            yield from self.literal(before_placeholder(marker))
        except EndedError:
            return True
        except MismatchError:
            return False
        finally:
            self.position = begin
        return True


def attempt(buffer: TextBuffer, parser: Parser[T]) -> Parser[T | None]:
    """Returns the result of a parser, or None and goes back where the text does not fit."""
    begin = buffer.position
    try:
        return (yield from parser)
    except MismatchError:
        buffer.reached = len(buffer.text) if buffer.has_ended else buffer.position
        buffer.position = begin
        return None


def fits(buffer: TextBuffer, parser: Parser[None]) -> Parser[bool]:
    """Returns whether the text fits a parser; where it does not, reading goes back."""

    def read() -> Parser[bool]:
        yield from parser
        return True

    return (yield from attempt(buffer, read())) is not None


class BufferedReader:
    """Runs a parser of one answer on the text as it comes; the base of such `PieceParser`s."""

    def __init__(self) -> None:
        self.reasoning = ReasoningPlaces()
        self._buffer = TextBuffer()
        self._pieces: list[AnswerPiece] = []
        self._in_vain = 0  # characters
        self._parser = self._answer()

    def _answer(self) -> Parser[None]:
        """Reads the whole answer, and appends to `_pieces` what is certain."""
        raise NotImplementedError

    def push(self, text: str) -> Iterator[AnswerPiece]:
        """Yields the pieces that are certain with this text."""
        self._buffer.push(text)
        yield from self._take()

    def finish(self) -> Iterator[AnswerPiece]:
        """Yields the remaining pieces."""
        self._buffer.has_ended = True
        yield from self._take()

    def _take(self) -> list[AnswerPiece]:
        next(self._parser, None)
        taken, self._pieces = self._pieces, []
        return taken

    def _attempt_call(self, call: Parser[T]) -> Parser[T | None]:
        """Returns a call, or None and goes back where the text is none, or after many attempts."""
        if self._in_vain > _MAX_IN_VAIN:
            return None
        begin = self._buffer.position
        value = yield from attempt(self._buffer, call)
        if value is None:
            self._in_vain += self._buffer.reached - begin
        return value
