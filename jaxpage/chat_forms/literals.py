"""Reads literals of JSON and Python from a text that grows, and gives up where there is none."""

from __future__ import annotations

import re

from jaxpage.chat_forms.growing import Growing, MismatchError, Wait

# Outside of strings: what numbers, words, and the marks between them are made of.
_NEXT = re.compile(r"[\"'{}\[\]()]|[^\s\w.,:+\-]")
_OF_STRING = {
    '"': re.compile(r'[^"\\\x00-\x1f]*+(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*+)*+'),
    "'": re.compile(r"[^'\\\x00-\x1f]*+(?:\\[^\x00-\x1f][^'\\\x00-\x1f]*+)*+"),
}
_CLOSES = {"{": "}", "[": "]", "(": ")"}
_BARE = re.compile(r"[\w.+\-]+")


def string_literal(text: Growing) -> Wait[str]:
    """Reads a string in quotes and returns it as it is written.

    Raises:
        MismatchError: There is none.
    """
    quote = yield from text.next_character()
    if quote not in ("'", '"'):
        raise MismatchError
    begin, place = text.place, text.place + 1
    while True:
        place = _end_of(_OF_STRING[quote], text.text, place)
        rest = text.text[place : place + 2]
        if rest[:1] == quote:
            text.place = place + 1
            return text.text[begin : text.place]
        if rest and rest != "\\":  # a string has no control characters
            raise MismatchError
        yield from text.more()


def nested_literal(text: Growing, *, is_python: bool = False) -> Wait[str]:
    """Reads an object, an array or a tuple, and returns it as it is written.

    Raises:
        MismatchError: What comes is none, as far as brackets and strings tell.
    """
    begin = text.place
    open_brackets: list[str] = []
    while True:
        found = _NEXT.search(text.text, text.place)
        if found is None:
            text.place = len(text.text)
            yield from text.more()
            continue
        character = found[0]
        if not open_brackets and (found.start() > begin or character not in _CLOSES):
            raise MismatchError
        text.place = found.start()
        if character == '"' or (character == "'" and is_python):
            yield from string_literal(text)
            continue
        text.place += 1
        if character in _CLOSES and (character != "(" or is_python):
            open_brackets.append(_CLOSES[character])
        elif not open_brackets or character != open_brackets.pop():
            raise MismatchError
        if not open_brackets:
            return text.text[begin : text.place]


def bare_literal(text: Growing) -> Wait[str]:
    """Reads a number or a word.

    Raises:
        MismatchError: There is none.
    """
    begin = text.place
    while True:
        end = _end_of(_BARE, text.text, begin)
        if end == begin < len(text.text):
            raise MismatchError
        if end > begin and (end < len(text.text) or text.has_ended):
            text.place = end
            return text.text[begin:end]
        yield from text.more()


def _end_of(pattern: re.Pattern[str], text: str, begin: int) -> int:
    found = pattern.match(text, begin)
    return found.end() if found else begin
