"""Finds the calls of a probe in the answer that a template renders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from jaxpage.chat_forms.literals import read_json, read_nested_literal, read_python
from jaxpage.chat_forms.markers import ARGUMENTS, CALL_INDEX
from jaxpage.chat_forms.probes import KEYS, NAMES, TEXTS, Call, Prober, with_placeholders
from jaxpage.chat_forms.text_buffer import MismatchError, Parser, TextBuffer

T = TypeVar("T")
CALLS = tuple(Call(name, {key: text}) for name, key, text in zip(NAMES, KEYS, TEXTS, strict=True))


@dataclass(frozen=True)
class RenderedCall:
    """Holds the position of a call in a text.

    Attributes:
        payload: How the call is written; see `ToolForm`.
        begin: The position of the JSON object or of the name.
        end: The position after the JSON object, the JSON arguments or the last value.
        mid: The text between the name and JSON arguments.
        name_path: The keys that lead to the name in a JSON object.
        arguments_path: The keys that lead to the arguments.
        as_text: True if the arguments are JSON text within the JSON object.
        is_code: True if the literals are Python's.
        value: The JSON object, or None.
    """

    payload: Literal["object", "json", "items"]
    begin: int
    end: int
    mid: str = ""
    name_path: tuple[str, ...] = ()
    arguments_path: tuple[str, ...] = ()
    as_text: bool = False
    is_code: bool = False
    value: Any = None


@dataclass(frozen=True)
class RenderedAnswer:
    """Holds an answer with the first calls of `CALLS`.

    Attributes:
        text: The answer.
        calls: The positions of the calls.
    """

    text: str
    calls: tuple[RenderedCall, ...]

    @property
    def before(self) -> str:
        """Returns what comes before the first call."""
        return self.text[: self.calls[0].begin]

    @property
    def between(self) -> str | None:
        """Returns what comes between two calls, or None if there is one."""
        if len(self.calls) == 1:
            return None
        return self.text[self.calls[0].end : self.calls[1].begin]

    @property
    def after(self) -> str:
        """Returns what comes after the last call."""
        return self.text[self.calls[-1].end :]


def render_calls(prober: Prober, calls: Sequence[Call], **fields: str) -> RenderedAnswer | None:
    """Returns an answer with calls, or None if the template does not render all of them.

    Args:
        prober: Renders answers.
        calls: The first calls of `CALLS`.
        fields: What else the answer has, as for `Prober.answer`.
    """
    text = prober.body(calls, **fields)
    if text is None:
        return None
    rendered_calls: list[RenderedCall] = []
    # The name of the other call tells the object of one call from an object around both.
    for call, other in zip(calls, reversed(NAMES), strict=False):
        rendered = _find(text, call, other, rendered_calls[-1].end if rendered_calls else 0)
        if rendered is None:
            return None
        rendered_calls.append(rendered)
    return RenderedAnswer(text, tuple(rendered_calls))


def _find(text: str, call: Call, other: str, begin: int) -> RenderedCall | None:
    """Returns the position of a call in a text, or None if its name or its arguments are missing.

    Args:
        text: The text.
        call: The call.
        other: The name of another call, which is not a part of this one.
        begin: The position from which on the call is looked for.
    """
    position = text.find(call.name, begin)
    if position < 0:
        return None
    for start, written, value, is_code in _objects(text, begin, position):
        if start + len(written) <= position or other in written:
            continue
        if (paths := _paths(value, call)) is not None:
            return RenderedCall("object", start, start + len(written), "", *paths, is_code, value)
    after = position + len(call.name)
    for start, written, value, is_code in _objects(text, after, len(text)):
        if value == call.arguments:
            end = start + len(written)
            return RenderedCall("json", position, end, text[after:start], is_code=is_code)
    (last,) = call.arguments.values()
    end = text.find(last, after)
    return None if end < 0 else RenderedCall("items", position, end + len(last))


def _objects(text: str, begin: int, end: int) -> Iterator[tuple[int, str, Any, bool]]:
    """Yields the objects that begin in a part of a text.

    Each comes with its position, its text, its value, and True if it is Python's and not JSON.
    """
    while (begin := text.find("{", begin, end)) >= 0:
        for read in (read_json, read_python):
            buffer, is_python = TextBuffer(text[begin:], has_ended=True), read is read_python
            try:
                written = result_of(read_nested_literal(buffer, is_python=is_python))
                yield begin, written, read(written), is_python
                break
            except MismatchError:
                continue
        begin += 1


def result_of(parser: Parser[T]) -> T:
    """Returns the result of a parser whose text has ended."""
    while True:
        try:
            next(parser)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # it is of the generator's type


def _paths(value: Any, call: Call) -> tuple[tuple[str, ...], tuple[str, ...], bool] | None:
    """Returns the paths to the name and the arguments of a call, or None.

    With them comes True if the arguments are JSON text.
    """
    if value == {call.name: call.arguments}:
        return (), (), False
    name = _path(value, call.name)
    texts = (json.dumps(call.arguments), json.dumps(call.arguments, separators=(",", ":")))
    for arguments in (call.arguments, *texts):
        path = _path(value, arguments)
        if name is not None and path is not None:
            return name, path, isinstance(arguments, str)
    return None


def _path(value: Any, target: Any) -> tuple[str, ...] | None:
    """Returns the keys that lead to a value, or None."""
    if not isinstance(value, dict):
        return None
    for key, item in value.items():
        if item == target:
            return (key,)
        if (path := _path(item, target)) is not None:
            return (key, *path)
    return None


def shape_of(text: str) -> str:
    """Returns the JSON text of the first call, with placeholders for what differs between calls."""
    for begin, written, value, _ in _objects(text, 1, len(text)):
        if value == CALLS[0].arguments:
            text = text[:begin] + ARGUMENTS + text[begin + len(written) :]
            break
    # Numbers that are left are those of the call, in quotes or not.
    text = re.sub(r'(?<=:)(\s*)("?)\d+\2(?=\s*[,}])', rf"\g<1>\g<2>{CALL_INDEX}\g<2>", text)
    return with_placeholders(text)
