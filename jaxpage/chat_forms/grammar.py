"""Writes the grammar of an answer that must call tools, in the model's own form.

The grammar is in llguidance's language, a dialect of Lark:

    start: begin call end         the marks of the form
    call: call0 | call1           a call of each tool
    call0: open "name" mid args0  the arguments, which keep to the tool's schema
    args0: %json {...}            or an item for each property, in the order of the schema
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpage.chat_forms.chat_format import ChatFormat
from jaxpage.chat_forms.forms import (
    ANY_ID,
    ARGUMENTS,
    HOLES,
    INDEX,
    JSON_TYPES,
    SAME_KEY,
    SAME_NAME,
    HeaderForm,
    ListForm,
    ToolForm,
    ValueForm,
    chunks,
    first_chunk,
)
from jaxpage.chat_forms.values import property_of, types_of

_HOLE = re.compile(f"([{HOLES}])")
_PATTERNS = {INDEX: "/[0-9]+/", ANY_ID: "/[a-zA-Z0-9]{9}/"}
_ANY_TEXT = r"/(.|\n)*/"
_CONSTRAINT = "<|constrain|>"
_MAX_DEPTH = 6  # of lists within lists that are not written as JSON


def grammar_of(
    form: ChatFormat,
    schemas: Mapping[str, dict[str, Any]],
    json_rule: Callable[[dict[str, Any]], str],
    *,
    several: bool,
    is_open: bool,
    special_tokens: Mapping[str, int],
) -> str:
    """Returns the grammar of an answer that is nothing but calls of these tools.

    Args:
        form: The form of answers, which has one of calls.
        schemas: The schemas of the tools' arguments, which are objects, by the tools' names.
        json_rule: Returns the right side of a rule for JSON that keeps to a schema.
        several: True if there may be more than one call.
        is_open: True if the prompt opens the reasoning, which comes first then.
        special_tokens: The ids of the tokens that are no text to the grammar, by their texts.

    Raises:
        ValueError: The form cannot be held to a schema; the message says why.
    """
    assert form.tools is not None
    writer = _Writer(form.tools, json_rule, special_tokens)
    thought = ""
    if is_open and form.reasoning is not None:
        thought = writer.until(form.reasoning.close) + " "
    if form.headers is not None:
        if form.reasoning is not None:
            # The model begins its reasoning itself, and it may go on with more of it.
            opened = writer.literal(form.reasoning.open)
            thought += f"({opened} {writer.until(form.reasoning.close)})* "
        return writer.headed(form.headers, schemas, before=thought)
    return writer.grammar(schemas, several=several, before=thought)


class _Writer:
    def __init__(
        self,
        form: ToolForm,
        json_rule: Callable[[dict[str, Any]], str],
        special_tokens: Mapping[str, int],
    ) -> None:
        self._form = form
        self._json_rule = json_rule
        self._special = special_tokens
        texts = sorted(special_tokens, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, texts)) + ")") if texts else None
        self._rules: list[str] = []

    def grammar(self, schemas: Mapping[str, dict[str, Any]], *, several: bool, before: str) -> str:
        """Returns the whole grammar."""
        form = self._form
        calls = [self._call(name, schema) for name, schema in schemas.items()]
        self._rules.append("call: " + " | ".join(calls))
        begin = form.begin + form.open if form.first is None else form.first
        start = f"start: {before}{self.literal(begin)} call"
        if several and (form.begin + form.open + form.between).strip():
            start += f" ({self.literal(form.between + form.open)} call)*"
        start += f" {self.literal(form.end)}"
        return "\n".join([start, *self._rules]) + "\n"

    def headed(
        self, form: HeaderForm, schemas: Mapping[str, dict[str, Any]], *, before: str
    ) -> str:
        """Returns the whole grammar where a call is a message with a header, of which one comes.

        The header is the template's, or it has the recipient after the channel, in which case the
        type of the arguments may be missing or have the mark that harmony has for it.
        """
        tools, calls = self._form, []
        words = chunks(tools.mid.removesuffix(form.body))
        kind = [word for word in words[-1:] if word.isalnum() and word != form.commentary]
        types = ["", *(f" {mark}{word}" for word in kind for mark in ("", _CONSTRAINT))]
        for name, schema in schemas.items():
            opened = f"{form.channel}{form.commentary} {form.recipient}{name}"
            headers = [tools.open + name + tools.mid, *(opened + one + form.body for one in types)]
            header = " | ".join(dict.fromkeys(map(self.literal, headers)))
            # The mark after a call may end the text, and then no grammar can demand it.
            close = f"({self.literal(tools.close)})?"
            calls.append(self._rule(f"({header}) {self._json(schema)} {close}"))
        return "\n".join([f"start: {before}({' | '.join(calls)})", *self._rules]) + "\n"

    def literal(self, mark: str, name: str = "", key: str = "") -> str:
        """Returns an expression for a mark."""
        parts = []
        for part in _HOLE.split(mark.replace(SAME_NAME, name).replace(SAME_KEY, key)):
            if part in _PATTERNS:
                parts.append(_PATTERNS[part])
                continue
            for text in self._pattern.split(part) if self._pattern else [part]:
                if text in self._special:
                    parts.append(f"<[{self._special[text]}]>")
                elif text:
                    parts.append(json.dumps(text))
        return " ".join(parts) or '""'

    def until(self, close: str) -> str:
        """Returns an expression for any text up to a mark, and the mark."""
        parts = self._pattern.split(close) if self._pattern else [close]
        if parts[0].strip():
            head = parts[0]
            rest = close[len(head) :]
            name = self._rule(_ANY_TEXT, f"[suffix={json.dumps(head)}]")
        else:
            # A special token is no text, so no text runs into it.
            rest = close.lstrip()
            name = self._rule(_ANY_TEXT)
        return f"{name} {self.literal(rest)}" if rest else name

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _json(self, schema: dict[str, Any]) -> str:
        return self._rule(self._json_rule(schema))

    def _call(self, name: str, schema: dict[str, Any]) -> str:
        """Returns the name of the rule for a call without its opening mark."""
        form = self._form
        if form.payload == "object":
            if form.arguments_as_text:
                raise ValueError("the model writes arguments as text, which no grammar holds")
            before, _, after = form.shape.partition(ARGUMENTS)
            written = json.dumps(name, ensure_ascii=False)[1:-1]
            opened, closed = self.literal(before, written), self.literal(after, written)
            arguments = f"{opened} {self._json(schema)} {closed}"
        elif form.payload == "json":
            mid = self.literal(form.mid, name)
            arguments = f"{json.dumps(name)} {mid} {self._json(schema)}"
        else:
            assert form.arguments is not None
            begin = self.literal(form.arguments.begin, name)
            items = self._members(form.arguments, schema, schema, 0)
            arguments = f"{json.dumps(name)} {begin} {items}"
        return self._rule(f"{arguments} {self.literal(form.close, name)}")

    def _members(self, form: ListForm, schema: Any, root: Any, depth: int) -> str:
        """Returns an expression for the items of an object, in the order of its properties."""
        if not isinstance(schema, dict) or "$ref" in schema or depth > _MAX_DEPTH:
            raise ValueError("a schema that refers to another cannot be held to this form")
        if not _MIXED.isdisjoint(schema):
            raise ValueError("a schema with anyOf, oneOf or allOf cannot be held to this form")
        required = schema.get("required") or []
        names = list(schema.get("properties") or {})
        if missing := [name for name in required if name not in names]:
            raise ValueError(f"the property {missing[0]!r} is required and has no schema")
        # Two chains of rules: `after` follows an item, `first` none.
        after = first = '""'
        for name in reversed(names):
            item = self._item(form, name, property_of(schema, name, root), root, depth)
            follow = f"{self.literal(form.between)} {item} {after}"
            alone = f"{item} {after}"
            if name in required:
                after, first = self._rule(follow), self._rule(alone)
            else:
                after, first = self._rule(f"{follow} | {after}"), self._rule(f"{alone} | {first}")
        return first

    def _item(self, form: ListForm, key: str, schema: Any, root: Any, depth: int) -> str:
        opened = self.literal(form.open) + " " + json.dumps(key)
        return self._rule(f"{opened} {self._values(form.values, key, schema, root, depth)}")

    def _values(
        self, values: Sequence[ValueForm], key: str, schema: Any, root: Any, depth: int
    ) -> str:
        """Returns an expression for a value with its marks."""
        allowed = types_of(schema, root) or JSON_TYPES
        found = []
        for value in values:
            if types := value.types & allowed:
                opened = self.literal(value.open, key=key)
                body = self._value(value, key, types, schema, root, depth)
                found.append(f"{opened} {body}")
        if not found:
            raise ValueError(f"the model's form has no values of the type of {key!r}")
        return self._rule(" | ".join(found))

    def _value(
        self,
        form: ValueForm,
        key: str,
        types: frozenset[str],
        schema: Any,
        root: Any,
        depth: int,
    ) -> str:
        close = form.close.replace(SAME_KEY, key)
        if form.encoding == "list":
            return f"{self._list(types, schema, root, depth)} {self.literal(close)}"
        if form.encoding in ("raw", "xml") and "string" in types:
            if (texts := _choices(schema)) is not None:
                return f"({' | '.join(map(json.dumps, texts))}) {self.literal(close)}"
            return self.until(close) if close.strip() else self._rule(self._text_before_marks())
        if self._form.is_code and types <= _WORDS.keys():
            words = " | ".join(f'"{word}"' for name in sorted(types) for word in _WORDS[name])
            return f"({words}) {self.literal(close)}"
        return f"{self._json(_alone(schema, types, root))} {self.literal(close)}"

    def _text_before_marks(self) -> str:
        """Returns a pattern of text that has no first character of a mark after it."""
        form = self._form.arguments
        assert form is not None
        begins = {first_chunk(form.between + form.open)[:1], first_chunk(self._form.close)[:1]}
        return "/[^" + "".join(re.escape(begin).replace("/", "\\/") for begin in begins) + "]*/"

    def _list(self, types: frozenset[str], schema: Any, root: Any, depth: int) -> str:
        is_object = types == {"object"}
        form = self._form.object if is_object else self._form.array
        assert form is not None
        if is_object:
            items = self._members(form, schema, root, depth + 1)
        else:
            inner = schema.get("items") if isinstance(schema, dict) else None
            if depth > _MAX_DEPTH:
                raise ValueError("a schema of many arrays in arrays cannot be held to this form")
            values: Sequence[ValueForm] = form.values
            if inner is None:
                values = [value for value in values if value.encoding != "list"]
            one = self._rule(
                f"{self.literal(form.open)} {self._values(values, '', inner, root, depth + 1)}"
            )
            items = f"({one} ({self.literal(form.between)} {one})*)?"
        return f"{self.literal(form.begin)} {items} {self.literal(form.end)}"


_WORDS = {"boolean": ("True", "False"), "null": ("None",)}  # of Python
_MIXED = frozenset({"anyOf", "oneOf", "allOf"})


def _choices(schema: Any) -> list[str] | None:
    """Returns the texts that a schema lists, or None if it lists none or others than texts."""
    if not isinstance(schema, dict):
        return None
    texts = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return None
    return texts or None


def _alone(schema: Any, types: frozenset[str], root: Any) -> dict[str, Any]:
    """Returns a schema that stands alone, for values of some types of a part of another schema."""
    if not isinstance(schema, dict) or not schema:
        return {"type": sorted(types)}
    if '"$ref"' not in json.dumps(schema):
        return schema
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return {**schema, **shared}
