"""Reads literals of JSON and Python: finds their ends in a text that grows, and their values."""

from __future__ import annotations

import ast
import json
import math
import re
import uuid
from typing import Any, NoReturn

from jaxpage.chat_forms.text_buffer import MismatchError, Parser, TextBuffer

# Outside of strings: what numbers, words, and the punctuation between them are made of.
_NEXT = re.compile(r"[\"'{}\[\]()]|[^\s\w.,:+\-]")
# Models write line breaks in strings now and then, without escaping them.
# The quantifiers are possessive: where the end of a string is missing, nothing is tried again.
_OF_STRING = {
    '"': re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL),
    "'": re.compile(r"[^'\\]*+(?:\\.[^'\\]*+)*+", re.DOTALL),
}
# What JSON and Python write differently: strings, words, brackets, and a comma before the end.
_STRING = "|".join(f"{quote}{text.pattern}{quote}" for quote, text in _OF_STRING.items())
_PARTS = re.compile(_STRING + r"|[A-Za-z_]\w*|[()]|,(?=\s*[}\])])", re.DOTALL)
_JSON_SPELLING = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]", ",": ""}
_ESCAPE = re.compile(r"""\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|(?P<other>.))|(?P<quote>")""", re.DOTALL)
_CLOSES = {"{": "}", "[": "]", "(": ")"}
_BARE = re.compile(r"[\w.+\-]*")
_MAX_LITERAL = 1 << 16  # characters that are read as Python; Python's parser nests on the C stack
_MAX_DEPTH = 64


def literal(buffer: TextBuffer) -> Parser[str]:
    """Reads any literal and returns it as it is written.

    Raises:
        MismatchError: There is none.
    """
    yield from buffer.skip_space()
    character = yield from buffer.next_character()
    if character in ("'", '"'):
        return (yield from _string(buffer))
    if character in _CLOSES:
        return (yield from read_nested_literal(buffer, is_python=True))
    return (yield from _bare(buffer))


def read_nested_literal(
    buffer: TextBuffer, *, is_python: bool = True, close: str = ""
) -> Parser[str]:
    """Reads an object, an array or a tuple, and returns it as it is written.

    Args:
        buffer: The text.
        is_python: False if only JSON is one, without single quotes and tuples.
        close: A marker after it. Where that comes too early, brackets at the end are missing, and
            they are added.

    Raises:
        MismatchError: What comes is none, as far as brackets and strings tell.
    """
    begin = buffer.position
    open_brackets: list[str] = []
    # Only where `_NEXT` stops is the marker looked for, and brackets and quotes mean something
    # else.
    may_close = close[:1] and _NEXT.match(close) and close[0] not in "[]{}()\"'"
    while True:
        match = _NEXT.search(buffer.text, buffer.position)
        if match is None:
            buffer.position = len(buffer.text)
            yield from buffer.more()
            continue
        character = match[0]
        if not open_brackets and (match.start() > begin or character not in _CLOSES):
            raise MismatchError
        buffer.position = match.start()
        if character == '"' or (character == "'" and is_python):
            yield from _string(buffer)
            continue
        if may_close and character == close[0] and (yield from buffer.comes(close)):
            return buffer.text[begin : buffer.position] + "".join(reversed(open_brackets))
        buffer.position += 1
        if character in _CLOSES and (character != "(" or is_python):
            open_brackets.append(_CLOSES[character])
        elif not open_brackets or character != open_brackets.pop():
            raise MismatchError
        if not open_brackets:
            return buffer.text[begin : buffer.position]


def _string(buffer: TextBuffer) -> Parser[str]:
    """Reads a string in quotes, the first of which is there."""
    begin, quote = buffer.position, buffer.text[buffer.position]
    end = begin + 1
    while True:
        end = _end_of(_OF_STRING[quote], buffer.text, end)
        if buffer.text[end : end + 1] == quote:
            buffer.position = end + 1
            return buffer.text[begin : buffer.position]
        yield from buffer.more()


def _bare(buffer: TextBuffer) -> Parser[str]:
    """Reads a number or a word."""
    begin = buffer.position
    while True:
        end = _end_of(_BARE, buffer.text, begin)
        if end == begin < len(buffer.text):
            raise MismatchError
        if end > begin and (end < len(buffer.text) or buffer.has_ended):
            buffer.position = end
            return buffer.text[begin:end]
        yield from buffer.more()


def _end_of(pattern: re.Pattern[str], text: str, begin: int) -> int:
    match = pattern.match(text, begin)
    return match.end() if match else begin


class Number(float):
    """A number that no float holds, with the digits that the model wrote."""

    digits: str = ""


def read_json(text: str) -> Any:
    """Returns the value of a JSON text.

    Raises:
        MismatchError: It is no JSON, or has a number that JSON does not have.
    """
    try:
        # Not `strict`, because strings may have line breaks. NaN is no JSON, but Python's parser
        # takes it.
        return json.loads(text, strict=False, parse_constant=_no_number, parse_float=_number)
    except (ValueError, RecursionError):
        raise MismatchError from None


def read_python(text: str) -> Any:
    """Returns the value of a literal of Python, which templates write that print a value.

    Raises:
        MismatchError: It is no literal that JSON could express.
    """
    text = text.strip()
    depth = text.count("[") + text.count("{") + text.count("(")
    if len(text) > _MAX_LITERAL or depth > _MAX_DEPTH:
        raise MismatchError
    try:
        value = ast.literal_eval(text)
        # Bytes, sets and complex numbers are literals of Python that JSON does not have.
        written = json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise MismatchError from None
    # Python takes `1, 2` for a tuple and passes over the comment of `3 # three`. Both are texts.
    if (isinstance(value, tuple) and text[0] != "(") or ("#" in text and "#" not in written):
        raise MismatchError
    return value


def read_literal(text: str) -> Any:
    """Returns the value of a JSON text, of a literal of Python, or of a mixture of both.

    Raises:
        MismatchError: It is neither.
    """
    for read in (read_json, read_python):
        try:
            return read(text)
        except MismatchError:
            continue
    return read_json(_PARTS.sub(_json_part, text))


def _json_part(part: re.Match[str]) -> str:
    """Returns a part of a literal as JSON writes it."""
    if part[0][0] not in _OF_STRING:
        return _JSON_SPELLING.get(part[0], part[0])
    return f'"{_ESCAPE.sub(_json_escape, part[0][1:-1])}"'


def _json_escape(escape: re.Match[str]) -> str:
    """Returns an escape or a quote within a string as JSON writes it.

    A backslash before a character that needs none is a backslash, but not before a quote.
    """
    if escape["quote"]:
        return '\\"'
    if escape["other"] is None:
        return escape[0]
    return "'" if escape["other"] == "'" else "\\\\" + escape["other"]


def as_json(value: Any) -> str:
    """Returns a value as JSON, with the digits of numbers as they were written.

    Raises:
        MismatchError: It is nested too deeply.
    """
    large: dict[str, str] = {}
    try:
        value = _with_names(value, large)
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise MismatchError from None
    try:
        text.encode()
    except UnicodeEncodeError:
        # Only an escape can express a lone surrogate.
        text = json.dumps(value)
    for name, digits in large.items():
        text = text.replace(f'"{name}"', digits)
    return text


def _with_names(value: Any, large: dict[str, str]) -> Any:
    """Returns a value with a unique name for each `Number`, and adds their digits to `large`."""
    if isinstance(value, Number):
        large[name := uuid.uuid4().hex] = value.digits
        return name
    if isinstance(value, dict):
        return {key: _with_names(item, large) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_names(item, large) for item in value]
    return value


def _number(digits: str) -> float:
    value = float(digits)
    if math.isfinite(value):
        return value
    large = Number(value)
    large.digits = digits
    return large


def _no_number(constant: str) -> NoReturn:
    raise ValueError(constant)
