"""Finds how a template writes arguments that are not JSON, one type of value after the other."""

from __future__ import annotations

import ast
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxpage.chat_forms.forms import SAME_KEY, SAME_NAME, ListForm, ValueForm
from jaxpage.chat_forms.marks import Split, numbered, split_list, without_prefix, without_suffix
from jaxpage.chat_forms.probes import KEYS, NAMES, TEXTS, Call, Prober

_ODD = "\"y'z\\w\nv&<u"  # a string that every escaping changes in its own way
_NUMBERS = (1734, 1735)
_SCALARS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("number", _NUMBERS[0], ("1734",)),
    ("boolean", True, ("true", "True")),
    ("null", None, ("null", "None")),
)


@dataclass(frozen=True)
class ItemForms:
    """Holds the forms of arguments.

    Attributes:
        arguments: The form of arguments.
        array: The form of arrays, if they are no literals.
        object: The form of objects, if they are no literals.
        close: The mark after a string, which belongs to the item.
        is_code: True if words are Python's, such as True.
    """

    arguments: ListForm
    array: ListForm | None
    object: ListForm | None
    close: str
    is_code: bool


def derive_items(prober: Prober) -> ItemForms | None:
    """Returns the forms of arguments that are not JSON, or None."""
    outer = _Outer.of(prober)
    if outer is None:
        return None
    split, mid = outer.split, outer.mid
    string = _string(outer, mid, split.close)
    if string is None:
        return None
    scalars = _scalars(outer)
    number = next((form for form in scalars if "number" in form.types), None)
    if number is None:
        return None
    values = [string, *scalars]
    array, array_value = _array(outer, number)
    members, object_value = _object(outer, number)
    if array_value is not None:
        values.append(array_value)
    if object_value is not None:
        values.append(object_value)
    nested = [
        _nested(number, kind) for kind, form in (("array", array), ("object", members)) if form
    ]
    if array is not None:
        array = replace(array, values=_merged([*array.values, *nested_in(array, nested)]))
    if members is not None:
        members = replace(members, values=_merged([*members.values, *nested_in(members, nested)]))
    arguments = ListForm(split.begin, split.open, split.between, "", _merged(values))
    is_code = "True" in (outer.region(True) or "")
    return ItemForms(arguments, array, members, split.close, is_code)


def nested_in(form: ListForm, nested: Sequence[ValueForm]) -> list[ValueForm]:
    """Returns the forms of lists within a list, with the marks of a number in it."""
    number = next(value for value in form.values if "number" in value.types)
    return [replace(value, open=number.open, close=number.close) for value in nested]


def _nested(number: ValueForm, kind: str) -> ValueForm:
    return ValueForm(frozenset({kind}), number.open, number.close, "list")


@dataclass(frozen=True)
class _Outer:
    """Holds the text around the arguments of a call with one argument.

    Attributes:
        prober: Renders answers.
        mid: The text between a key and a string.
        split: The marks of the list of arguments.
        rest: The text after the only argument.
    """

    prober: Prober
    mid: str
    split: Split
    rest: str

    @classmethod
    def of(cls, prober: Prober) -> _Outer | None:
        (key, other, _), (text, second, _) = KEYS, TEXTS
        one = prober.body([Call(NAMES[0], {key: text})])
        two = prober.body([Call(NAMES[0], {key: text, other: second})])
        if one is None or two is None:
            return None
        parts = cut(two, [NAMES[0], key, text, other, second])
        if parts is None or cut(one, [NAMES[0], key, text]) is None:
            return None
        _, before, mid, between, other_mid, after = parts
        if mid.replace(key, SAME_KEY) != other_mid.replace(other, SAME_KEY):
            return None
        before = _numbered_begin(prober, _named(before))
        between = _named(between).replace(key, SAME_KEY)
        split = split_list(before, between, _named(after).replace(other, SAME_KEY))
        alone = cut(one, [NAMES[0], key, text])
        assert alone is not None
        rest = without_prefix(_named(alone[-1]).replace(key, SAME_KEY), split.close)
        return cls(prober, mid.replace(key, SAME_KEY), split, rest)

    def region(self, value: Any) -> str | None:
        """Returns what is written between a key and the next item for a value, or None."""
        written = self.prober.body([Call(NAMES[0], {KEYS[0]: value})])
        parts = None if written is None else cut(written, [NAMES[0], KEYS[0]])
        if parts is None:
            return None
        region = _named(parts[-1]).replace(KEYS[0], SAME_KEY)
        return without_suffix(region, self.rest, exact=True)


def _numbered_begin(prober: Prober, before: str) -> str:
    """Returns what comes before the first key, with a hole where it has the number of the call."""
    two = prober.body([Call(NAMES[0], {KEYS[0]: TEXTS[0]}), Call(NAMES[1], {KEYS[1]: TEXTS[1]})])
    parts = None if two is None else cut(two, [NAMES[0], KEYS[0], TEXTS[0], NAMES[1], KEYS[1]])
    return before if parts is None else numbered(before, parts[4].replace(NAMES[1], SAME_NAME))[0]


def cut(text: str, parts: Sequence[str]) -> list[str] | None:
    """Returns the texts before, between and after parts that follow each other, or None."""
    found, begin = [], 0
    for part in parts:
        place = text.find(part, begin)
        if place < 0:
            return None
        found.append(text[begin:place])
        begin = place + len(part)
    return [*found, text[begin:]]


def _named(text: str) -> str:
    return text.replace(NAMES[0], SAME_NAME)


def _string(outer: _Outer, mid: str, close: str) -> ValueForm | None:
    """Returns the form of strings."""
    encoding: Literal["raw", "xml", "json", "python"] | None = "raw"
    region = outer.region(f"zqX{_ODD}zqY")
    if region is not None and "zqX" in region and "zqY" in region:
        inner = region[region.index("zqX") + 3 : region.rindex("zqY")]
        encoding = _encoding(inner, region[: region.index("zqX")][-1:])
    if encoding is None:
        return None
    if encoding in ("json", "python"):
        mid, close = mid[:-1], close[1:]
    return ValueForm(frozenset({"string"}), mid, close, encoding)


def _encoding(inner: str, quote: str) -> Literal["raw", "xml", "json", "python"] | None:
    if inner == _ODD:
        return "raw"
    if quote in ('"', "'"):
        readers: tuple[tuple[Any, Literal["json", "python"]], ...] = (
            (json.loads, "json"),
            (ast.literal_eval, "python"),
        )
        for read, name in readers:
            try:
                if read(f"{quote}{inner}{quote}") == _ODD:
                    return name
            except (ValueError, SyntaxError):
                continue
    return "xml" if html.unescape(inner) == _ODD else "raw"


def _scalars(outer: _Outer) -> list[ValueForm]:
    found = []
    for kind, value, spellings in _SCALARS:
        region = outer.region(value)
        if region is not None and (form := _around(region, spellings, {kind})) is not None:
            found.append(form)
    return found


def _around(region: str, spellings: Sequence[str], types: set[str]) -> ValueForm | None:
    for spelled in spellings:
        # The last one, because a mark before the value may name its type.
        before, there, after = region.rpartition(spelled)
        if there:
            encoding: Literal["raw", "python"] = "raw" if after.strip() else "python"
            return ValueForm(frozenset(types), before, after, encoding)
    return None


def spellings(value: Any) -> tuple[str, ...]:
    """Returns how templates write an array or an object as a literal."""
    compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False), compact, str(value), json.dumps(value, indent=4)


def _array(outer: _Outer, number: ValueForm) -> tuple[ListForm | None, ValueForm | None]:
    """Returns the form of arrays that are no literals, and the form of the value of a key."""
    kind = frozenset({"array"})
    sample = [TEXTS[0], TEXTS[1]]
    region = outer.region(sample)
    if region is None:
        return None, None
    if (literal := _around(region, spellings(sample), {"array"})) is not None:
        return None, literal
    numbers = outer.region(list(_NUMBERS))
    parts = cut(region, sample)
    plain = None if numbers is None else cut(numbers, [str(number) for number in _NUMBERS])
    if parts is None or plain is None:
        return None, None
    texts, others = split_list(*parts), split_list(*plain)
    value = ValueForm(kind, number.open, number.close, "list")
    begin = others.begin.removeprefix(number.open)
    end = others.end.removesuffix(number.close) if number.close else others.end
    encoding: Literal["raw", "python"] = "raw" if others.close.strip() else "python"
    elements = (
        ValueForm(frozenset({"string"}), texts.open, texts.close, "raw"),
        ValueForm(frozenset({"number", "boolean", "null"}), others.open, others.close, encoding),
    )
    return ListForm(begin, "", others.between, end, elements, has_keys=False), value


def _object(outer: _Outer, number: ValueForm) -> tuple[ListForm | None, ValueForm | None]:
    """Returns the form of objects that are no literals, and the form of the value of a key."""
    kind = frozenset({"object"})
    sample = {KEYS[1]: TEXTS[1], KEYS[2]: TEXTS[2]}
    region = outer.region(sample)
    if region is None:
        return None, None
    if (literal := _around(region, spellings(sample), {"object"})) is not None:
        return None, literal
    parts = cut(region, [KEYS[1], TEXTS[1], KEYS[2], TEXTS[2]])
    alone = outer.region({KEYS[1]: _NUMBERS[0]})
    plain = None if alone is None else cut(alone, [KEYS[1], str(_NUMBERS[0])])
    if parts is None or plain is None:
        return None, None
    before, mid, between, _, after = parts
    after = after.replace(KEYS[2], SAME_KEY)
    split = split_list(before, between.replace(KEYS[1], SAME_KEY), after)
    value = ValueForm(kind, number.open, number.close, "list")
    end = split.end.removesuffix(number.close) if number.close else split.end
    close = without_suffix(plain[2].replace(KEYS[1], SAME_KEY), split.end, exact=True) or ""
    encoding: Literal["raw", "python"] = "raw" if close.strip() else "python"
    members = (
        ValueForm(frozenset({"string"}), mid, split.close, "raw"),
        ValueForm(frozenset({"number", "boolean", "null"}), plain[1], close, encoding),
    )
    begin = split.begin.removeprefix(number.open)
    return ListForm(begin, split.open, split.between, end, members), value


def _merged(values: Sequence[ValueForm]) -> tuple[ValueForm, ...]:
    """Returns the forms with one for all types that are written alike."""
    found: list[ValueForm] = []
    for value in values:
        for place, other in enumerate(found):
            if value.encoding != "list" and replace(other, types=value.types) == value:
                found[place] = replace(other, types=other.types | value.types)
                break
        else:
            found.append(value)
    return tuple(dict.fromkeys(found))
