"""Finds how a template writes arguments that are not JSON, one type of value after the other."""

from __future__ import annotations

import ast
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxpage.chat_forms.forms import Encoding, ListForm, ValueForm
from jaxpage.chat_forms.markers import (
    KEY,
    ListMarkers,
    split_list,
    with_call_index,
    without_prefix,
)
from jaxpage.chat_forms.probes import KEYS, NAMES, TEXTS, Call, Prober, with_placeholders

_BEGIN, _END = "zqBegin", "zqEnd"
_ESCAPED = "\"y'z\\w\nv&<u"  # a string that every escaping changes in its own way
_MEMBERS = ("zqMemberA", "zqMemberB")
_NUMBERS = (1734, 1735)
_SCALARS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("number", _NUMBERS[0], ("1734",)),
    ("boolean", True, ("true", "True")),
    ("null", None, ("null", "None")),
)
_LISTS: dict[str, Any] = {
    "array": list(TEXTS),
    "object": dict(zip(_MEMBERS, TEXTS, strict=True)),
}


@dataclass(frozen=True)
class ItemForms:
    """Holds the forms of arguments.

    Attributes:
        arguments: The form of arguments.
        array: The form of arrays, if they are no literals.
        object: The form of objects, if they are no literals.
        close: The marker after a string, which belongs to the item.
        is_code: True if words are Python's, such as True.
    """

    arguments: ListForm
    array: ListForm | None
    object: ListForm | None
    close: str
    is_code: bool


def derive_items(prober: Prober) -> ItemForms | None:
    """Returns the forms of arguments that are not JSON, or None."""
    arguments = _Arguments.of(prober)
    if arguments is None:
        return None
    scalars = []
    for kind, scalar, spellings in _SCALARS:
        if (value := _find_spelling(arguments.region(scalar), spellings, kind)) is not None:
            scalars.append(value)
    number = next((value for value in scalars if "number" in value.types), None)
    if number is None:
        return None
    values = [*_strings(arguments), *scalars]
    forms: dict[str, ListForm] = {}
    for kind, sample in _LISTS.items():
        region = arguments.region(sample)
        if (value := _find_spelling(region, _spellings(sample), kind)) is not None:
            values.append(value)
        elif (form := _list(arguments, region, number, kind)) is not None:
            values.append(ValueForm(frozenset({kind}), number.open, number.close, "list"))
            forms[kind] = form
    lists = [value for value in values if value.encoding == "list"]
    for kind, form in forms.items():
        *_, others = form.values
        # A list that is an element of a list has the markers of an element around it.
        inner = [replace(value, open=others.open, close=others.close) for value in lists]
        forms[kind] = replace(form, values=_merge([*form.values, *inner]))
    split = arguments.split
    items = ListForm(split.begin, split.open, split.between, "", _merge(values))
    is_code = "True" in (arguments.region(True) or "")
    return ItemForms(items, forms.get("array"), forms.get("object"), split.close, is_code)


@dataclass(frozen=True)
class _Arguments:
    """Holds the text around the arguments of a call with one argument.

    Attributes:
        prober: Renders answers.
        mid: The text between a key and a string.
        split: The markers of the list of arguments.
        ending: The text after the only argument.
    """

    prober: Prober
    mid: str
    split: ListMarkers
    ending: str

    @classmethod
    def of(cls, prober: Prober) -> _Arguments | None:
        (key, other), (text, second) = KEYS, TEXTS
        pieces = _cut(prober.body([Call(NAMES[0], {key: text})]), [NAMES[0], key, text])
        two = _cut(
            prober.body([Call(NAMES[0], {key: text, other: second})]),
            [NAMES[0], key, text, other, second],
        )
        if pieces is None or two is None:
            return None
        _, begin, mid, between, other_mid, after = two
        if mid != other_mid:
            return None
        # What comes before the first key may have the number of the call.
        calls = prober.body([Call(NAMES[0], {key: text}), Call(NAMES[1], {other: second})])
        parts = _cut(calls, [NAMES[0], key, text, NAMES[1], other])
        if parts is not None:
            begin, _ = with_call_index(begin, parts[4])
        split = split_list(begin, between, after)
        return cls(prober, mid, split, without_prefix(pieces[-1], split.close))

    def region(self, value: Any) -> str | None:
        """Returns what is written between a key and the next item for a value, or None."""
        parts = _cut(self.prober.body([Call(NAMES[0], {KEYS[0]: value})]), [NAMES[0], KEYS[0]])
        if parts is None or not parts[-1].endswith(self.ending):
            return None
        return parts[-1].removesuffix(self.ending)


def _cut(text: str | None, parts: Sequence[str]) -> list[str] | None:
    """Returns the markers before, between and after parts that follow each other, or None."""
    pieces = []
    for part in parts:
        before, is_there, text = (text or "").partition(part)
        if not is_there:
            return None
        pieces.append(with_placeholders(before))
    return [*pieces, with_placeholders(text or "")]


def _strings(arguments: _Arguments) -> list[ValueForm]:
    """Returns the forms of strings.

    Where a template puts a text in quotes as it is, a model may write a literal with other quotes.
    """
    opened, close = arguments.mid, arguments.split.close
    encoding: Encoding = "raw"
    parts = _cut(arguments.region(_BEGIN + _ESCAPED + _END), [_BEGIN, _END])
    if parts is not None:
        encoding = _encoding(parts[1], quote=parts[0][-1:])
    if encoding in ("json", "python"):
        # The quotes belong to the literal and not to the markers.
        opened, close = opened[:-1], close[1:]
    form = ValueForm(frozenset({"string"}), opened, close, encoding)
    if parts is not None and encoding == "raw" and parts[0].strip() != opened.strip():
        # A text with signs of markup has markers of its own, such as CDATA.
        return [replace(form, open=parts[0], close=parts[2]), form]
    if encoding != "raw" or opened[-1:] not in ("'", '"') or opened[-1:] != close[:1]:
        return [form]
    return [form, replace(form, open=opened[:-1], close=close[1:], encoding="python")]


def _encoding(written: str, quote: str) -> Encoding:
    """Returns how `_ESCAPED` is written after a character that may be a quote."""
    if written == _ESCAPED:
        return "raw"
    if quote in ('"', "'"):
        try:
            if json.loads(f"{quote}{written}{quote}") == _ESCAPED:
                return "json"
        except ValueError:
            pass
        try:
            if ast.literal_eval(f"{quote}{written}{quote}") == _ESCAPED:
                return "python"
        except (ValueError, SyntaxError):
            pass
    return "xml" if html.unescape(written) == _ESCAPED else "raw"


def _find_spelling(region: str | None, spellings: Sequence[str], kind: str) -> ValueForm | None:
    """Returns the form of values of a type that are written in one of some ways, or None."""
    for spelling in spellings:
        # The last one, because a marker before the value may name its type.
        before, is_there, after = (region or "").rpartition(spelling)
        if is_there:
            return _scalar({kind}, before, after)
    return None


def _scalar(types: set[str], opened: str, close: str) -> ValueForm:
    """Returns the form of values that are no strings; they are literals if no marker follows."""
    return ValueForm(frozenset(types), opened, close, "raw" if close.strip() else "python")


def _spellings(value: Any) -> tuple[str, ...]:
    """Returns how templates write an array or an object as a literal."""
    compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False), compact, str(value), json.dumps(value, indent=4)


def _list(
    arguments: _Arguments, region: str | None, number: ValueForm, kind: str
) -> ListForm | None:
    """Returns the form of arrays or objects that are no literals, or None.

    Args:
        arguments: The text around arguments.
        region: What is written for the value of `_LISTS`.
        number: The form of a number, around which there are the markers of any value.
        kind: "array" or "object".
    """
    if kind == "array":
        texts = _cut(region, TEXTS)
        numbers = _cut(arguments.region(list(_NUMBERS)), list(map(str, _NUMBERS)))
        if texts is None or numbers is None:
            return None
        of_texts, split = split_list(*texts), split_list(*numbers)
        strings = (of_texts.open, of_texts.close)
        others = (split.open, split.close)
        opened = ""
    else:
        (key, other), (text, second) = _MEMBERS, TEXTS
        texts = _cut(region, [key, text, other, second])
        numbers = _cut(arguments.region({key: _NUMBERS[0]}), [key, str(_NUMBERS[0])])
        if texts is None or numbers is None:
            return None
        before, mid, between, _, after = texts
        split = split_list(before, between.replace(key, KEY), after.replace(other, KEY))
        strings = (mid, split.close)
        close = numbers[2].replace(key, KEY)
        others = (numbers[1], close.removesuffix(split.end) if close.endswith(split.end) else "")
        opened = split.open
    values = (
        ValueForm(frozenset({"string"}), *strings, "raw"),
        _scalar({"number", "boolean", "null"}, *others),
    )
    begin, end = split.begin.removeprefix(number.open), split.end.removesuffix(number.close)
    return ListForm(begin, opened, split.between, end, values)


def _merge(values: Sequence[ValueForm]) -> tuple[ValueForm, ...]:
    """Returns the forms with one for all types that are written alike."""
    merged: list[ValueForm] = []
    for value in values:
        for position, other in enumerate(merged):
            if value.encoding != "list" and replace(other, types=value.types) == value:
                merged[position] = replace(other, types=other.types | value.types)
                break
        else:
            merged.append(value)
    return tuple(dict.fromkeys(merged))
