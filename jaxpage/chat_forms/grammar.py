"""Writes the grammar of an answer that must call tools, in the model's own form.

The grammar is in llguidance's language, a dialect of Lark:

    start: begin call end         the markers of the form
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
from jaxpage.chat_forms.forms import JSON_TYPES, HeaderForm, ListForm, ToolForm, ValueForm
from jaxpage.chat_forms.markers import (
    ARGUMENTS,
    CALL_ID,
    CALL_INDEX,
    KEY,
    PLACEHOLDER,
    TOOL_NAME,
    any_of,
    chunks,
    first_chunk,
)
from jaxpage.chat_forms.values import property_of, types_of

# Templates of Mistral refuse an id that is not of nine letters and digits.
_PATTERNS = {CALL_INDEX: "/[0-9]+/", CALL_ID: "/[a-zA-Z0-9]{9}/"}
# With a limit, because a model could write white space for ever.
_SPACE = r"/[ \n]{0,4}/"  # white space that may come before text and before a call
_ANY_TEXT = r"/(.|\n)*/"
_CONSTRAINT = "<|constrain|>"
_PYTHON_WORDS = {"boolean": ("True", "False"), "null": ("None",)}
_UNIONS = frozenset({"anyOf", "oneOf", "allOf"})


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
    reasoning = ""
    if is_open and form.reasoning is not None:
        reasoning = writer.until(form.reasoning.close) + " "
    if form.headers is not None:
        if form.reasoning is not None:
            # The model begins its reasoning itself, and it may go on with more of it.
            opened = writer.literal(form.reasoning.open)
            reasoning += f"({opened} {writer.until(form.reasoning.close)})* "
        return writer.write_headed(form.headers, schemas, before=reasoning)
    return writer.grammar(schemas, several=several, before=reasoning)


def grammar_of_text(
    form: ChatFormat, text_rule: str, *, is_open: bool, special_tokens: Mapping[str, int]
) -> str:
    """Returns the grammar of an answer whose text keeps to a rule, unless it calls a tool.

    After the marker that begins a call anything may follow.

    Args:
        form: The form of answers, which has one of calls.
        text_rule: The right side of a rule for the text.
        is_open: True if the prompt opens the reasoning, which comes first then.
        special_tokens: The ids of the tokens that are no text to the grammar, by their texts.

    Raises:
        ValueError: No marker of the form tells a call from text.
    """
    assert form.tools is not None
    marker = first_chunk(form.tools.first_opening)
    if not marker or form.headers is not None:
        raise ValueError("no marker of the model's form tells a call from text")
    writer = _Writer(form.tools, lambda schema: text_rule, special_tokens)
    before = ""
    if is_open and form.reasoning is not None:
        before = writer.until(form.reasoning.close) + " "
    return writer.write_text_or_call(marker, before=before)


class _Writer:
    """Writes the rules of a grammar; most methods return an expression and add rules for it."""

    def __init__(
        self,
        form: ToolForm,
        json_rule: Callable[[dict[str, Any]], str],
        special_tokens: Mapping[str, int],
    ) -> None:
        self._form = form
        self._json_rule = json_rule
        self._special = special_tokens
        self._special_text = re.compile(f"({any_of(tuple(special_tokens)).pattern})")
        self._schema: dict[str, Any] = {}  # of a call's arguments, which references lead into
        self._rules: list[str] = []

    def grammar(self, schemas: Mapping[str, dict[str, Any]], *, several: bool, before: str) -> str:
        """Returns the whole grammar."""
        form = self._form
        calls = [self._call(name, schema) for name, schema in schemas.items()]
        self._rules.append("call: " + " | ".join(calls))
        start = f"start: {before}{self._write_after_space(form.first_opening)} call"
        if several and (form.opening + form.between).strip():
            start += f" ({self._write_after_space(form.between + form.open)} call)*"
        start += f" {self.literal(form.end)}"
        return "\n".join([start, *self._rules]) + "\n"

    def write_headed(
        self, form: HeaderForm, schemas: Mapping[str, dict[str, Any]], *, before: str
    ) -> str:
        """Returns the whole grammar where a call is a message with a header, of which one comes.

        The header is the template's, or it has the recipient after the channel, in which case the
        type of the arguments may be missing or have the marker that harmony has for it.
        """
        tools, calls = self._form, []
        words = chunks(tools.mid.removesuffix(form.body))
        kind = [word for word in words[-1:] if word.isalnum() and word != form.commentary]
        types = ["", *(f" {marker}{word}" for word in kind for marker in ("", _CONSTRAINT))]
        for name, schema in schemas.items():
            opened = f"{form.channel}{form.commentary} {form.recipient}{name}"
            headers = [
                tools.open + name + tools.mid,
                *(opened + type_text + form.body for type_text in types),
            ]
            header = " | ".join(dict.fromkeys(map(self.literal, headers)))
            # The marker after a call may end the text, and then no grammar can demand it.
            close = f"({self.literal(tools.close)})?"
            calls.append(self._rule(f"({header}) {self._json(schema)} {close}"))
        return "\n".join([f"start: {before}({' | '.join(calls)})", *self._rules]) + "\n"

    def write_text_or_call(self, marker: str, *, before: str) -> str:
        """Returns the whole grammar of a text, or of a call of which only the marker is held."""
        text, space = self._json({}), self._rule(_SPACE)
        # In llguidance's language `<[*]>` is any token.
        start = f"start: {before}{space} ({text} | {self.literal(marker)} <[*]>*)"
        return "\n".join([start, *self._rules]) + "\n"

    def _write_after_space(self, marker: str) -> str:
        """Returns an expression for a marker after some white space.

        The white space and the text after it are one terminal: the grammar's lexer would take a
        line break alone for the beginning of another marker.
        """
        marker = marker.lstrip()
        text = self._special_text.split(PLACEHOLDER.split(marker)[0])[0]
        if not text:
            return f"{self._rule(_SPACE)} {self.literal(marker)}"
        # `re.escape` writes a line break as a backslash and a break, which no line of a grammar can
        # have.
        pattern = re.escape(text).replace("\\\n", "\\n").replace("/", "\\/")
        spaced = self._rule(f"{_SPACE[:-1]}{pattern}/")
        following = marker[len(text) :]
        return f"{spaced} {self.literal(following)}" if following else spaced

    def literal(self, marker: str, name: str = "", key: str = "") -> str:
        """Returns an expression for a marker."""
        parts = []
        for part in PLACEHOLDER.split(marker.replace(TOOL_NAME, name).replace(KEY, key)):
            if part in _PATTERNS:
                parts.append(_PATTERNS[part])
                continue
            for text in self._special_text.split(part):
                if text in self._special:
                    # Special tokens have no text there, and are named by their ids.
                    parts.append(f"<[{self._special[text]}]>")
                elif text:
                    parts.append(json.dumps(text))
        return " ".join(parts) or '""'

    def until(self, close: str) -> str:
        """Returns an expression for any text up to a marker, and the marker.

        White space before the marker belongs to the text, and need not come.
        """
        close = close.lstrip()
        if head := self._special_text.split(close)[0].rstrip():
            tail = close[len(head) :]
            # llguidance ends the text of such a rule where its suffix comes for the first time.
            name = self._rule(_ANY_TEXT, f"[suffix={json.dumps(head)}]")
        else:
            # A special token is no text, so no text runs into it.
            tail = close
            name = self._rule(_ANY_TEXT)
        return f"{name} {self.literal(tail)}" if tail else name

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _json(self, schema: dict[str, Any]) -> str:
        return self._rule(self._json_rule(schema))

    def _call(self, name: str, schema: dict[str, Any]) -> str:
        """Returns the name of the rule for a call without its opening marker."""
        form = self._form
        self._schema = schema
        if form.payload == "object":
            if form.arguments_as_text:
                raise ValueError("the model writes arguments as text, which no grammar holds")
            before, _, after = form.shape.partition(ARGUMENTS)
            # The quotes are in the shape.
            written = json.dumps(name, ensure_ascii=False)[1:-1]
            opened, closed = self.literal(before, written), self.literal(after, written)
            call = f"{opened} {self._json(schema)} {closed}"
        elif form.payload == "json":
            call = f"{json.dumps(name)} {self.literal(form.mid, name)} {self._json(schema)}"
        else:
            assert form.arguments is not None
            begin = self.literal(form.arguments.begin, name)
            call = f"{json.dumps(name)} {begin} {self._members(form.arguments, schema)}"
        return self._rule(f"{call} {self.literal(form.close, name)}")

    def _members(self, form: ListForm, schema: Any) -> str:
        """Returns an expression for the items of an object, in the order of its properties."""
        if not isinstance(schema, dict) or "$ref" in schema:
            raise ValueError("a schema that refers to another cannot be held to this form")
        if not _UNIONS.isdisjoint(schema):
            raise ValueError("a schema with anyOf, oneOf or allOf cannot be held to this form")
        required = schema.get("required") or []
        properties = schema.get("properties") or {}
        if not isinstance(required, list) or not isinstance(properties, dict):
            raise ValueError("properties must be an object, and required a list")
        names = list(properties)
        if missing := [name for name in required if name not in names]:
            raise ValueError(f"the property {missing[0]!r} is required and has no schema")
        # Two chains of rules: `after` follows an item, `first` none.
        after = first = '""'
        for name in reversed(names):
            value = self._values(form.values, name, property_of(schema, name, self._schema))
            item = self._rule(f"{self.literal(form.open)} {json.dumps(name)} {value}")
            follow = f"{self.literal(form.between)} {item} {after}"
            alone = f"{item} {after}"
            if name in required:
                after, first = self._rule(follow), self._rule(alone)
            else:
                after, first = self._rule(f"{follow} | {after}"), self._rule(f"{alone} | {first}")
        return first

    def _values(self, values: Sequence[ValueForm], key: str, schema: Any) -> str:
        """Returns an expression for a value with its markers."""
        allowed = types_of(schema, self._schema) or JSON_TYPES
        alternatives = []
        bare = [value.open for value in values if value.is_bare and "string" in value.types]
        for value in values:
            shorter = (other for other in bare if other.strip() and other != value.open)
            if value.is_bare and any(map(value.open.startswith, shorter)):
                continue  # what it writes, such as CDATA, is a text of the other form, too
            if types := value.types & allowed:
                opened = self.literal(value.open, key=key)
                alternatives.append(f"{opened} {self._value(value, key, types, schema)}")
        if not alternatives:
            raise ValueError(f"the model's form has no values of the type of {key!r}")
        return self._rule(" | ".join(alternatives))

    def _value(self, form: ValueForm, key: str, types: frozenset[str], schema: Any) -> str:
        """Returns an expression for a value of one form, with the marker after it."""
        close = form.close.replace(KEY, key)
        if form.is_bare and "string" in types:
            if (texts := _choices(schema)) is not None:
                value = f"({' | '.join(map(json.dumps, texts))})"
            elif close.strip():
                return self.until(close)
            else:
                return self._rule(self._text_before_markers())
        elif form.encoding == "list":
            value = self._list(form, schema)
        elif self._form.is_code and types <= _PYTHON_WORDS.keys():
            words = (f'"{word}"' for name in sorted(types) for word in _PYTHON_WORDS[name])
            value = f"({' | '.join(words)})"
        else:
            value = self._json(self._standalone(schema, types))
        return f"{value} {self.literal(close)}"

    def _text_before_markers(self) -> str:
        """Returns a pattern of text that has no first character of a marker after it."""
        form = self._form.arguments
        assert form is not None
        begins = {first_chunk(form.between + form.open)[:1], first_chunk(self._form.close)[:1]}
        return "/[^" + "".join(re.escape(begin).replace("/", "\\/") for begin in begins) + "]*/"

    def _list(self, value: ValueForm, schema: Any) -> str:
        """Returns an expression for an array or an object that is no literal."""
        form = self._form.list_of(value)
        if value.types == {"object"}:
            items = self._members(form, schema)
        else:
            inner = schema.get("items") if isinstance(schema, dict) else None
            values: Sequence[ValueForm] = form.values
            if inner is None:
                values = [value for value in values if value.encoding != "list"]
            element = self._values(values, "", inner)
            single = self._rule(f"{self.literal(form.open)} {element}")
            items = f"({single} ({self.literal(form.between)} {single})*)?"
        return f"{self.literal(form.begin)} {items} {self.literal(form.end)}"

    def _standalone(self, schema: Any, types: frozenset[str]) -> dict[str, Any]:
        """Returns a part of the call's schema as a complete schema.

        Args:
            schema: The part.
            types: The types of the values, if the part does not say.
        """
        if not isinstance(schema, dict) or not schema:
            return {"type": sorted(types)}
        if '"$ref"' not in json.dumps(schema):
            return schema
        shared = self._schema.keys() & {"$defs", "definitions"}
        return {**schema, **{name: self._schema[name] for name in sorted(shared)}}


def _choices(schema: Any) -> list[str] | None:
    """Returns the texts that a schema lists, or None if it lists none or others than texts."""
    if not isinstance(schema, dict):
        return None
    texts = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return None
    return texts or None
