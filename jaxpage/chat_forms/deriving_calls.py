"""Finds how a template writes tool calls, by what differs between answers with other calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jaxpage.chat_forms.deriving_items import derive_items
from jaxpage.chat_forms.deriving_text import TextForms
from jaxpage.chat_forms.forms import (
    ANY_ID,
    ARGUMENTS,
    INDEX,
    SAME_KEY,
    SAME_NAME,
    ContentForm,
    ToolForm,
)
from jaxpage.chat_forms.growing import Growing, MismatchError, Wait
from jaxpage.chat_forms.literals import nested_literal
from jaxpage.chat_forms.marks import (
    common_prefix,
    common_suffix,
    numbered,
    split_list,
    without_prefix,
    without_suffix,
)
from jaxpage.chat_forms.probes import CONTENT, IDS, KEYS, NAMES, TEXTS, Call, Prober
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


def derive_calls(prober: Prober, text: TextForms) -> tuple[ToolForm, ContentForm] | None:
    """Returns the form of calls and the marks around content, or None; neither is proven."""
    one = prober.body(CALLS[:1])
    if one is None or (first := _found(one, CALLS[0])) is None:
        return None
    two, second = prober.body(CALLS), None
    if two is not None:
        first_of_two = _found(two, CALLS[0], NAMES[1])
        second = first_of_two and _found(two, CALLS[1], NAMES[0], first_of_two.end)
        if first_of_two is not None and second is not None:
            first = first_of_two
    is_two = two is not None and second is not None
    begin = _found(one, CALLS[0])
    assert begin is not None
    alone = one[: begin.begin]
    alone = alone[len(text.header) :] if alone.startswith(text.header) else alone
    prompted = (prober.prompt() or "")[prober.begin() + len(text.header) :]
    opening, content = _opening(prober, text, alone)
    after = two[second.end :] if two is not None and second is not None else one[first.end :]
    (alone_tail,) = text.content.tails
    tail = common_suffix(alone_tail, after)
    after = without_suffix(after, tail) or ""
    tails = dict.fromkeys(mark for mark in (alone_tail, tail) if mark.strip())
    content = replace(content, tails=tuple(tails))
    if not content.closes and (close := without_suffix(alone_tail, tail) or "").strip():
        content = replace(content, closes=(close,))
    form = ToolForm("", "object", is_code=first.is_code)
    if prompted.strip() and opening.startswith(prompted):
        form = replace(form, first=opening[len(prompted) :])
    elif opening.strip() and not alone.removeprefix(text.before).strip():
        form = replace(form, first="")
    if not first.is_json:
        items = derive_items(prober)
        if items is None:
            return None
        form = replace(form, payload="items", arguments=items.arguments)
        form = replace(form, array=items.array, object=items.object, is_code=items.is_code)
        after = without_prefix(_same(after, 1 if is_two else 0), items.close)
    elif first.name_path is None:
        mid = _same(first.mid, 0)
        if second is not None:
            mid = numbered(mid, _same(second.mid, 1))[0]
        form = replace(form, payload="json", mid=mid)
    else:
        path = first.arguments_path
        form = replace(form, name_path=first.name_path, arguments_path=path)
        source = two if two is not None and second is not None else one
        written = source[first.begin : first.end]
        if first.is_code:
            written = json.dumps(first.value, ensure_ascii=False)
        form = replace(form, arguments_as_text=first.as_text, shape=_shape(written))
    after = _same(after, 1 if is_two else 0)
    opening = _same(opening, 0)
    if two is not None and second is not None:
        between = _same(two[first.end : second.begin], 0).replace(IDS[1], ANY_ID)
        if not first.is_json and items is not None:
            between = without_prefix(between, items.close)
        opening, between = numbered(opening, between)
        split = split_list(opening, between, after)
        form = replace(form, begin=split.begin, open=split.open, close=split.close)
        form = replace(form, between=split.between, end=split.end)
    elif opening.rstrip().endswith("[") and after.lstrip().startswith("]"):
        form = replace(form, begin=opening, between=",", end=after)
    else:
        form = replace(form, open=opening, close=after)
    return replace(form, name=_name(form)), content


def _name(form: ToolForm) -> str:
    """Returns a short name for people: the kind of the call and the first words of its mark."""
    words = re.findall(r"\w+", form.begin + form.open)
    kind = {"object": "json", "json": "name-json", "items": "name-items"}[form.payload]
    if form.payload == "object" and form.begin.rstrip().endswith("["):
        kind = "json-array"
    return "-".join([kind, *[word for word in words if not word.isdigit()][:2]])


def _opening(prober: Prober, text: TextForms, alone: str) -> tuple[str, ContentForm]:
    """Returns the mark before the first call, and the marks around the content.

    Args:
        prober: Renders answers.
        text: What is known of the text around content.
        alone: What comes between the header and the first call of an answer without content.
    """
    content = text.content
    said = prober.body(CALLS[:1], content=CONTENT)
    found = None if said is None else _found(said, CALLS[0])
    if said is None or found is None or CONTENT not in said[: found.begin]:
        return _without_thought(alone, text), content
    follows = said[said.index(CONTENT) + len(CONTENT) : found.begin]
    close = common_prefix(follows, content.tails[0])
    close = close if close.strip() else ""
    shared = common_suffix(alone, follows)
    if not shared.strip() and not _without_thought(alone, text).strip():
        shared = follows
    opening = shared[len(close) :] if close and shared.startswith(close) else shared
    junk = follows[: len(follows) - len(opening)]
    before = said[: said.index(CONTENT)].removeprefix(text.header).removeprefix(text.before)
    if before.strip() and (text.reasoning is None or text.reasoning.open.strip() not in before):
        content = replace(content, opens=tuple(dict.fromkeys((*content.opens, before))))
    return opening, replace(content, closes=(junk,) if junk.strip() else ())


def _without_thought(alone: str, text: TextForms) -> str:
    """Returns what comes before a call without the marks of reasoning that is empty."""
    rest = alone.removeprefix(text.before)
    if text.reasoning is None:
        return rest
    opened, close = text.reasoning.open.strip(), text.reasoning.close.strip()
    before, there, after = rest.partition(close)
    return after if there and before.strip() == opened else rest


def _found(text: str, call: Call, other: str = "", begin: int = 0) -> Found | None:
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
        if read is None or start + len(read[0]) <= place or (other and other in read[0]):
            continue
        written, value, is_code = read
        if (paths := _paths(value, call)) is not None:
            return Found(start, start + len(written), "", *paths, is_code, value)
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


def _shape(text: str) -> str:
    """Returns the JSON text of a call with holes for what differs from call to call."""
    call = CALLS[0]
    for begin in _braces(text, 1, len(text)):
        read = _read_at(text, begin)
        if read is not None and read[1] == call.arguments:
            text = text[:begin] + ARGUMENTS + text[begin + len(read[0]) :]
            break
    # Numbers that are left are those of the call, in quotes or not.
    text = re.sub(r'(?<=:)(\s*)("?)\d+\2(?=\s*[,}])', rf"\g<1>\g<2>{INDEX}\g<2>", text)
    return text.replace(IDS[0], ANY_ID).replace(call.name, SAME_NAME)


def _same(text: str, index: int) -> str:
    """Returns a mark with holes for what is of this call alone."""
    text = text.replace(IDS[index], ANY_ID).replace(NAMES[index], SAME_NAME)
    return text.replace(KEYS[index], SAME_KEY)
