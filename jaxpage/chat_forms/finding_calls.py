"""Finds where the calls of a probe stand in the answer that a template renders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxpage.chat_forms.forms import ANY_ID, ARGUMENTS, INDEX, SAME_KEY, SAME_NAME
from jaxpage.chat_forms.growing import Growing, MismatchError, Wait
from jaxpage.chat_forms.literals import nested_literal
from jaxpage.chat_forms.probes import IDS, KEYS, NAMES, TEXTS, Call, Prober
from jaxpage.chat_forms.values import read_literal

T = TypeVar("T")
CALLS = tuple(
    Call(name, {key: text}) for name, key, text in zip(NAMES, KEYS[:2], TEXTS[:2], strict=True)
)


@dataclass(frozen=True)
class Found:
    """Holds where a call stands in a text.

    Attributes:
        begin: The place of the JSON object or of the name.
        end: The place after the JSON object, the JSON arguments or the last value.
        mid: The text between the name and JSON arguments.
        name_path: The keys that lead to the name in a JSON object, or None if it is none.
        arguments_path: The keys that lead to the arguments.
        as_text: True if the arguments are JSON text within the JSON object.
        is_code: True if the literals are Python's.
        value: The JSON object, or None.
        is_json: False if the arguments are neither JSON nor within a JSON object.
    """

    begin: int
    end: int
    mid: str = ""
    name_path: tuple[str, ...] | None = None
    arguments_path: tuple[str, ...] = ()
    as_text: bool = False
    is_code: bool = False
    value: Any = None
    is_json: bool = True


@dataclass(frozen=True)
class Written:
    """Holds an answer with the first calls of `CALLS`.

    Attributes:
        text: The answer.
        found: The places of the calls.
    """

    text: str
    found: tuple[Found, ...]

    @property
    def before(self) -> str:
        """Returns what comes before the first call."""
        return self.text[: self.found[0].begin]

    @property
    def between(self) -> str | None:
        """Returns what comes between two calls, or None if there is one."""
        if len(self.found) == 1:
            return None
        return self.text[self.found[0].end : self.found[1].begin]

    @property
    def after(self) -> str:
        """Returns what comes after the last call."""
        return self.text[self.found[-1].end :]


def render_calls(prober: Prober, calls: Sequence[Call], **said: str) -> Written | None:
    """Returns an answer with calls, or None if the template does not render all of them.

    Args:
        prober: Renders answers.
        calls: The first calls of `CALLS`.
        said: What else the answer has, as for `Prober.answer`.
    """
    text = prober.body(calls, **said)
    found: list[Found] = []
    for call, other in zip(calls, reversed(NAMES), strict=False):
        begin = found[-1].end if found else 0
        one = None if text is None else _found(text, call, other, begin)
        if one is None:
            return None
        found.append(one)
    return None if text is None else Written(text, tuple(found))


def same(text: str, index: int) -> str:
    """Returns a mark with holes for what is of one call of `CALLS` alone."""
    text = text.replace(IDS[index], ANY_ID).replace(NAMES[index], SAME_NAME)
    return text.replace(KEYS[index], SAME_KEY)


def _found(text: str, call: Call, other: str, begin: int) -> Found | None:
    """Returns where a call stands in a text, or None if its name or its arguments do not.

    Args:
        text: The text.
        call: The call.
        other: The name of another call, which is not a part of this one.
        begin: The place from which on the call is looked for.
    """
    place = text.find(call.name, begin)
    if place < 0:
        return None
    for start in _braces(text, begin, place):
        read = _read_at(text, start)
        if read is None or start + len(read[0]) <= place or other in read[0]:
            continue
        shown, value, is_code = read
        if (paths := _paths(value, call)) is not None:
            return Found(start, start + len(shown), "", *paths, is_code, value)
    after = place + len(call.name)
    for start in _braces(text, after, len(text)):
        read = _read_at(text, start)
        if read is not None and read[1] == call.arguments:
            end = start + len(read[0])
            return Found(place, end, text[after:start], is_code=read[2])
    last = list(call.arguments.values())[-1]
    end = text.find(str(last), after)
    return None if end < 0 else Found(place, end + len(str(last)), is_json=False)


def _braces(text: str, begin: int, end: int) -> Iterator[int]:
    while (begin := text.find("{", begin, end)) >= 0:
        yield begin
        begin += 1


def _read_at(text: str, begin: int) -> tuple[str, Any, bool] | None:
    """Returns the object that stands at a place: its text, its value, and if it is Python's."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, begin)
        return text[begin:end], value, False
    except (ValueError, RecursionError):
        pass
    growing = Growing()
    growing.push(text[begin:])
    growing.has_ended = True
    try:
        written = done(nested_literal(growing, is_python=True))
        return written, read_literal(written), True
    except (MismatchError, ValueError):
        return None


def done(parser: Wait[T]) -> T:
    """Returns the result of a parser whose text has ended."""
    while True:
        try:
            next(parser)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # it is of the generator's type


def _paths(value: Any, call: Call) -> tuple[tuple[str, ...], tuple[str, ...], bool] | None:
    if isinstance(value, dict) and value == {call.name: call.arguments}:
        return (), (), False
    name = _path(value, call.name)
    if name is None:
        return None
    as_object = _path(value, call.arguments)
    if as_object is not None:
        return name, as_object, False
    for written in (json.dumps(call.arguments), json.dumps(call.arguments, separators=(",", ":"))):
        as_text = _path(value, written)
        if as_text is not None:
            return name, as_text, True
    return None


def _path(value: Any, wanted: Any) -> tuple[str, ...] | None:
    """Returns the keys that lead to a value, or None."""
    if not isinstance(value, Mapping):
        return None
    for key, one in value.items():
        if one == wanted:
            return (key,)
        if (rest := _path(one, wanted)) is not None:
            return (key, *rest)
    return None


def shape_of(text: str) -> str:
    """Returns the JSON text of the first call with holes for what differs from call to call."""
    call = CALLS[0]
    for begin in _braces(text, 1, len(text)):
        read = _read_at(text, begin)
        if read is not None and read[1] == call.arguments:
            text = text[:begin] + ARGUMENTS + text[begin + len(read[0]) :]
            break
    # Numbers that are left are those of the call, in quotes or not.
    text = re.sub(r'(?<=:)(\s*)("?)\d+\2(?=\s*[,}])', rf"\g<1>\g<2>{INDEX}\g<2>", text)
    return text.replace(IDS[0], ANY_ID).replace(call.name, SAME_NAME)
