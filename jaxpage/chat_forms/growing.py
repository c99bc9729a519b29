"""Holds a text that grows, for parsers that are generators.

A parser yields where it needs more text than there is, and goes on when more has come:

    pushed "<tool"      literal("<tool_call>") yields
    pushed "_call>{"    literal("<tool_call>") returns
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

from jaxpage.chat_forms.forms import ANY_ID, HOLES, INDEX, before_hole, chunks

T = TypeVar("T")
Wait = Generator[None, None, T]
_HOLE = re.compile(f"([{HOLES}])")
_ID = re.compile(r"[\w.:\-]+")
_KEPT = 1 << 16  # characters that were read and are still held; they are removed all at once


class MismatchError(Exception):
    """The text does not fit the form."""


class EndedError(MismatchError):
    """The text fits the form as far as it goes, and has ended."""


class Growing:
    """Holds the text that was pushed, and the place to which it was read."""

    def __init__(self) -> None:
        self.text = ""
        self.place = 0
        self.reached = 0  # to which the last attempt that failed had read
        self.has_ended = False

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
        """Removes what was read, if it is much; nobody may go back then."""
        if self.place > _KEPT:
            self.text = self.text[self.place :]
            self.place = 0

    def more(self) -> Wait[None]:
        """Waits for more text.

        Raises:
            EndedError: There is no more.
        """
        if self.has_ended:
            raise EndedError
        yield

    def next_character(self) -> Wait[str]:
        """Returns the next character without reading it; empty at the end."""
        while self.place >= len(self.text) and not self.has_ended:
            yield
        return self.text[self.place : self.place + 1]

    def skip_space(self) -> Wait[None]:
        """Reads white space."""
        while (character := (yield from self.next_character())) and character.isspace():
            self.place += 1

    def exact(self, wanted: str) -> Wait[None]:
        """Reads a text that must come next, character by character.

        Raises:
            MismatchError: Something else comes, or the text has ended.
        """
        while not self.text.startswith(wanted, self.place):
            if not wanted.startswith(self.text[self.place :]):
                raise MismatchError
            yield from self.more()
        self.place += len(wanted)

    def literal(
        self, mark: str, name: str = "", key: str = "", *, before_value: bool = False
    ) -> Wait[None]:
        """Reads a mark, with any white space where the mark has some or could have some.

        Args:
            mark: The mark, in which holes stand for what differs.
            name: The text of the hole for the name of the call.
            key: The text of the hole for the key of the item.
            before_value: True if a bare value follows, so that white space after the mark is read
                only as far as the mark has it.
        """
        filled = mark.translate({ord("\ue001"): name, ord("\ue003"): key})
        for chunk in chunks(filled):
            yield from self.skip_space()
            for part in _HOLE.split(chunk):
                if part in (INDEX, ANY_ID):
                    yield from self._hole(part)
                else:
                    yield from self.exact(part)
        if before_value:
            yield from self.own_space(filled)
        elif mark[-1:].isspace():
            yield from self.skip_space()

    def own_space(self, mark: str) -> Wait[None]:
        """Reads the white space that a mark ends with, as far as it is there."""
        for wanted in mark[len(mark.rstrip()) :]:
            if (yield from self.next_character()) != wanted:
                return
            self.place += 1

    def _hole(self, kind: str) -> Wait[None]:
        begin = self.place
        while True:
            found = _ID.match(self.text, begin)
            if found is not None and (found.end() < len(self.text) or self.has_ended):
                break
            if found is None and begin < len(self.text):
                raise MismatchError
            yield from self.more()
        if kind == INDEX:
            digits = re.compile(r"\d+").match(found[0])
            if digits is None:
                raise MismatchError
            self.place = begin + digits.end()
        else:
            self.place = found.end()

    def find(self, stops: tuple[str, ...], limit: int = 0) -> Wait[tuple[int, str]]:
        """Returns the place and the text of the first stop from here on, without reading.

        Args:
            stops: The texts to look for; of two at one place the longer is found.
            limit: The most characters before it; 0 for any number.

        Raises:
            MismatchError: None comes within the limit, or the text has ended.
        """
        pattern = re.compile("|".join(map(re.escape, sorted(stops, key=len, reverse=True))))
        longest = max(map(len, stops))
        begin = self.place
        while True:
            found = pattern.search(self.text, begin)
            if found is not None and (
                found.end() + longest <= len(self.text)
                or self.has_ended
                or len(found[0]) == longest
            ):
                return found.start(), found[0]
            if found is None:
                begin = max(self.place, len(self.text) - longest + 1)
            if limit and len(self.text) - self.place > limit + longest:
                raise MismatchError
            if self.has_ended:
                raise EndedError
            yield

    def comes(self, mark: str) -> Wait[bool]:
        """Returns whether a mark comes next, as far as it has no hole, without reading it.

        It is also True if the text ends before that is certain, and for a mark without text.
        """
        begin = self.place
        try:
            yield from self.literal(before_hole(mark))
        except EndedError:
            return True
        except MismatchError:
            return False
        finally:
            self.place = begin
        return True


def attempt(text: Growing, parser: Wait[T]) -> Wait[T | None]:
    """Returns the result of a parser, or None and goes back where the text does not fit."""
    begin = text.place
    try:
        return (yield from parser)
    except MismatchError:
        text.reached = len(text.text) if text.has_ended else text.place
        text.place = begin
        return None


def fits(text: Growing, parser: Wait[None]) -> Wait[bool]:
    """Returns whether the text fits a parser; where it does not, reading goes back."""

    def read() -> Wait[bool]:
        yield from parser
        return True

    return (yield from attempt(text, read())) is not None
