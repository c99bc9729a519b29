"""Finds the calls of tools in the text of an answer.

The formats are those of Hermes and Qwen, of Llama 3, and those that a grammar makes the model
write.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NoReturn

from jaxpage.serving.wire.pieces import Piece, PieceParser, held_back


def call_of(text: str, names: frozenset[str]) -> Piece | None:
    """Returns the call that a JSON object is, or None.

    It is a call only if it names one of the given tools and its arguments are an object.
    """
    # The digits of numbers that no float holds, by the names that replace them in the parsed value.
    large: dict[str, str] = {}

    def number(digits: str) -> float | str:
        if math.isfinite(found := float(digits)):
            return found
        large[name := uuid.uuid4().hex] = digits
        return name

    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=number)
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("name"), str)
        or value["name"] not in names
    ):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    written = _as_text(arguments)
    for name, digits in large.items():
        written = written.replace(f'"{name}"', digits)
    return Piece("call", written, value["name"])


def _no_number(constant: str) -> NoReturn:
    raise ValueError(constant)


def _as_text(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Only an escape can express a lone surrogate.
        return json.dumps(arguments)
    return text


class Hermes:
    """Reads calls in the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    An answer may have any number of them, with content around them. The last call may lack its
    closing mark if the text ends before it; a mark in a string of the JSON is not a mark. A text
    between marks that is no call is content, with its marks. White space before and after a call is
    not content.
    """

    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"
    _NEXT = {  # the marks to look for in each state  # noqa: RUF012
        "outside": re.compile(OPEN),
        "inside": re.compile(rf'["\\]|{CLOSE}'),
        "broken": re.compile(CLOSE),  # the text is no JSON, so it has no strings
    }
    _OF_STRING = re.compile(r'[^"\\\x00-\x1f]*+(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*+)*+')

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._state: Literal["outside", "inside", "broken"] = "outside"
        self._inside: list[str] = []
        self._string: list[str] | None = None  # the open string between the marks
        self._held = ""  # text that may be the beginning of a mark or of an escape
        # White space after content; it is content only if more content follows.
        self._space: list[str] = []
        self._has_called = False

    def push(self, text: str) -> Iterator[Piece]:
        """Yields the pieces that are certain with this text."""
        text = self._held + text
        self._held = ""
        begin = 0
        while begin < len(text):
            if self._string is not None:
                begin, is_broken = self._more_of_string(self._string, text, begin)
                if is_broken:
                    yield from self._broken(self._string)
                continue
            found = self._NEXT[self._state].search(text, begin)
            if found is None:
                mark = self.OPEN if self._state == "outside" else self.CLOSE
                certain = len(text) - held_back(text[max(begin, len(text) - len(mark)) :], mark)
                yield from self._said(text[begin:certain])
                self._held = text[certain:]
                return
            yield from self._said(text[begin : found.start()])
            begin = found.end()
            if found[0] == self.OPEN:
                self._state = "inside"
            elif found[0] == self.CLOSE:
                yield from self._called(self.CLOSE)
            elif found[0] == '"':
                self._string = ['"']
            else:
                self._inside.append(found[0])
                self._state = "broken"

    def finish(self) -> Iterator[Piece]:
        """Yields the remaining pieces."""
        if self._string is not None:
            yield from self._broken([*self._string, self._held])
            self._held = ""
        if self._state != "outside":
            yield from self._called(self._held)
        else:
            yield from self._said(self._held)
        space = "".join(self._space)
        if space and not self._has_called:
            yield Piece("content", space)

    def _more_of_string(self, string: list[str], text: str, begin: int) -> tuple[int, bool]:
        """Returns how far the text was read, and whether the string can go no further.

        A string of JSON has no control characters.
        """
        found = self._OF_STRING.match(text, begin)
        end = found.end() if found else begin
        string.append(text[begin:end])
        if text[end:] == "\\":
            self._held = "\\"
            return len(text), False
        if text[end : end + 1] == '"':
            self._inside += [*string, '"']
            self._string = None
            return end + 1, False
        return end, end < len(text)

    def _broken(self, string: list[str]) -> Iterator[Piece]:
        """Gives up a string that is no JSON, so that a mark in it was a mark after all.

        The text after that mark is read again. No string can be broken in it, because all of its
        quotes follow a backslash.
        """
        self._string = None
        before, mark, behind = "".join(string).partition(self.CLOSE)
        self._inside.append(before)
        self._state = "broken"
        if mark:
            yield from self._called(mark)
            yield from self.push(behind)
            held = self._held
            self._held = ""
            yield from self._said(held)

    def _said(self, text: str) -> Iterator[Piece]:
        if self._state != "outside":
            self._inside.append(text)
            return
        content = text.rstrip()
        if content:
            yield Piece("content", "".join(self._space) + content)
            self._space.clear()
        self._space.append(text[len(content) :])

    def _called(self, mark: str) -> Iterator[Piece]:
        """Yields the call of the text between the marks, or that text as content.

        Args:
            mark: The part of the closing mark that the text has.
        """
        text = "".join(self._inside)
        self._inside.clear()
        self._state = "outside"
        if (call := call_of(text, self._names)) is not None:
            self._space.clear()
            self._has_called = True
            yield call
        else:
            yield from self._said(self.OPEN + text + mark)


class JsonCalls:
    """Reads JSON objects that are calls, one after the other, from the beginning of the answer.

    If an answer begins otherwise it is content, and so is everything from the first object on that
    is no call.
    """

    _OF_STRUCTURE = re.compile(r'[{}"\\]')

    def __init__(
        self, names: frozenset[str], *, separators: str, tag: str = "", keeps_cut: bool = True
    ) -> None:
        """Makes the parser of an answer.

        Args:
            names: The names of the tools.
            separators: The characters that may come between objects, in addition to white space.
            tag: A text that may come before the first object.
            keeps_cut: True if an object that does not end is content; otherwise it is dropped.
        """
        self._names = names
        self._separators = separators
        self._tag = tag
        self._keeps_cut = keeps_cut
        self._is_content = False
        self._has_called = False
        self._held: list[str] = []  # the text since the last call
        self._depth = 0  # the number of open braces
        self._in_string = self._is_escaped = False

    def push(self, text: str) -> Iterator[Piece]:
        """Yields the pieces that are certain with this text."""
        if self._is_content:
            if text:
                yield Piece("content", text)
            return
        if self._depth and not self._is_escaped and not self._OF_STRUCTURE.search(text):
            self._held.append(text)
            return
        for position, character in enumerate(text):
            self._held.append(character)
            if self._depth == 0 and character != "{":
                if not self._may_stand_between(character):
                    yield from self._give_up(text[position + 1 :])
                    return
            elif self._closes(character):
                found = "".join(self._held)
                if (call := call_of(found[found.index("{") :], self._names)) is None:
                    yield from self._give_up(text[position + 1 :])
                    return
                self._held.clear()
                self._has_called = True
                yield call

    def finish(self) -> Iterator[Piece]:
        """Yields the remaining pieces."""
        if self._keeps_cut and (self._depth or not self._has_called):
            yield from self._give_up("")

    def _may_stand_between(self, character: str) -> bool:
        if character.isspace() or character in self._separators:
            return True
        begun = "".join(self._held).lstrip()
        return not self._has_called and len(begun) <= len(self._tag) and self._tag.startswith(begun)

    def _closes(self, character: str) -> bool:
        """Returns whether the object ends with this character of it."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character in '\\"':
                self._is_escaped = character == "\\"
                self._in_string = character == "\\"
            return False
        self._in_string = character == '"'
        self._depth += (character == "{") - (character == "}")
        return self._depth == 0

    def _give_up(self, rest: str) -> Iterator[Piece]:
        self._is_content = True
        text = "".join(self._held) + rest
        self._held.clear()
        if text:
            yield Piece("content", text)


class NamedCall:
    """Reads an answer that is nothing but the arguments of one call.

    The grammar of a tool that the request names makes the model write it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> Iterator[Piece]:
        """Yields the pieces that are certain with this text."""
        if text:
            yield Piece("arguments", text) if self._has_begun else Piece("call", text, self._name)
            self._has_begun = True

    def finish(self) -> Iterator[Piece]:
        """Yields the remaining pieces."""
        return iter(())


def hermes(names: frozenset[str]) -> PieceParser:
    """Returns the parser for the format of Hermes and Qwen."""
    return Hermes(names)


def llama3_json(names: frozenset[str]) -> PieceParser:
    """Returns the parser for the format of Llama 3."""
    return JsonCalls(names, separators=";", tag="<|python_tag|>")


def required(names: frozenset[str]) -> PieceParser:
    """Returns the parser for answers that keep to `required_schema`.

    A call that is cut off is dropped, because no client reads this format itself.
    """
    return JsonCalls(names, separators="[],", keeps_cut=False)


TOOL_PARSERS: dict[str, Callable[[frozenset[str]], PieceParser]] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
}
# These marks may be special tokens, which decoding can leave out.
MARKS = {"hermes": (Hermes.OPEN, Hermes.CLOSE), "llama3_json": ("<|python_tag|>",)}


def required_schema(tools: list[tuple[str, dict[str, Any]]], *, several: bool) -> dict[str, Any]:
    """Returns the schema of a list of calls.

    Args:
        tools: The name and the schema of each tool.
        several: True if the list may have more than one call.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": _arguments(index)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, (name, _) in enumerate(tools)
    ]
    definitions = _definitions(schema for _, schema in tools)
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls},
        "$defs": definitions,
    }
    return schema if several else {**schema, "maxItems": 1}


def named_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of the arguments of one tool.

    This is the tool's own schema if its type is "object"; otherwise an object is demanded as well.
    """
    return (
        schema
        if schema.get("type") == "object"
        else {**_arguments(0), "$defs": _definitions([schema])}
    )


def _arguments(index: int) -> dict[str, Any]:
    """Returns the schema of an object that keeps to the schema of a tool."""
    return {"type": "object", "$ref": f"#/$defs/tool{index}"}


def _definitions(schemas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the schemas of tools, each with an "$id", so that its references lead into itself.

    Older drafts ignore an "$id" next to a "$ref", so "$schema" is removed; the compiler of grammars
    uses it for nothing else.
    """
    return {
        f"tool{index}": {
            **{name: value for name, value in schema.items() if name != "$schema"},
            "$id": f"https://jaxpage.invalid/tool{index}/",
        }
        for index, schema in enumerate(schemas)
    }
