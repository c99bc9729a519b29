"""Reads one tool call by its form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpage.chat_forms.forms import ListForm, ToolForm, ValueForm, before_hole, chunks, first_chunk
from jaxpage.chat_forms.growing import (
    EndedError,
    Growing,
    MismatchError,
    Wait,
    attempt,
    fits,
)
from jaxpage.chat_forms.literals import bare_literal, nested_literal, string_literal
from jaxpage.chat_forms.pieces import Piece
from jaxpage.chat_forms.values import (
    as_json,
    property_of,
    read_json,
    read_literal,
    type_of,
    types_of,
    value_of,
)

_MAX_NAME = 256  # characters of a name or a key
_MAX_DEPTH = 32


@dataclass(frozen=True)
class Tools:
    """Holds the tools that may be called, with the schemas of their arguments.

    Attributes:
        schemas: The schemas by name; None if any name is that of a tool.
    """

    schemas: Mapping[str, Any] | None = None

    def check(self, name: str) -> None:
        """Raises MismatchError if no tool has this name."""
        if not name or (self.schemas is not None and name not in self.schemas):
            raise MismatchError

    def schema(self, name: str) -> Any:
        """Returns the schema of the arguments of a tool, or None."""
        return None if self.schemas is None else self.schemas.get(name)


class CallReader:
    """Reads calls of one form from a text that grows."""

    def __init__(self, form: ToolForm, tools: Tools, text: Growing) -> None:
        self._form = form
        self._tools = tools
        self._text = text
        self._depth = 0  # of lists that are not written as JSON

    def call(self) -> Wait[Piece]:
        """Reads what comes after the call's opening mark, and its closing mark.

        A text that ends within the closing mark is complete if nothing else could follow.

        Raises:
            MismatchError: The text is no call of a tool.
        """
        form, text = self._form, self._text
        if form.payload == "object":
            yield from text.skip_space()
            piece, is_complete = self._object((yield from self._nested())), True
        else:
            name = yield from self._name()
            if form.payload == "json":
                yield from text.literal(form.mid, name)
                piece, is_complete = (yield from self.json_call(name)), True
            else:
                assert form.arguments is not None
                schema = self._tools.schema(name)
                arguments = yield from self._members(form.arguments, form.close, schema, schema)
                piece, is_complete = Piece("call", _written(arguments), name), False
        begin = text.place
        try:
            yield from text.literal(form.close, piece.name)
        except EndedError:
            if not is_complete and not self._is_past_items(text.text[begin:].strip()):
                raise
            text.place = len(text.text)
        return piece

    def json_call(self, name: str) -> Wait[Piece]:
        """Reads the JSON arguments of a call whose name was read.

        Raises:
            MismatchError: They are no object.
        """
        yield from self._text.skip_space()
        arguments = _read((yield from self._nested()))
        if not isinstance(arguments, dict):
            raise MismatchError
        return Piece("call", _written(arguments), name)

    def _nested(self) -> Wait[str]:
        return (yield from nested_literal(self._text, is_python=self._form.is_code))

    def _is_past_items(self, rest: str) -> bool:
        """Returns whether a part of the closing mark shows that no further item comes."""
        form = self._form.arguments
        assert form is not None
        close, item, rest = map(_dense, (self._form.close, form.between + form.open, rest))
        shared = 0
        while shared < min(len(close), len(item)) and close[shared] == item[shared]:
            shared += 1
        return not close or len(rest) > shared

    def _name(self) -> Wait[str]:
        """Reads the name of a tool, which ends where the next mark begins."""
        form, text = self._form, self._text
        if form.payload == "json":
            stops = [first_chunk(form.mid) or "{"]
        else:
            assert form.arguments is not None
            following = form.arguments
            ends = [following.begin + following.open, following.begin + form.close]
            stops = [chunk for mark in ends if (chunk := first_chunk(mark) or mark[:1])]
        yield from text.skip_space()
        place, _ = yield from text.find(tuple(stops), _MAX_NAME)
        name = text.text[text.place : place].strip()
        if any(character.isspace() for character in name):
            raise MismatchError
        self._tools.check(name)
        text.place = place
        return name

    def _object(self, written: str) -> Piece:
        """Returns the call that a JSON object is.

        Raises:
            MismatchError: It names no tool, or its arguments are no object.
        """
        form, value = self._form, _read(written)
        if not form.name_path:
            if not isinstance(value, dict) or len(value) != 1:
                raise MismatchError
            ((name, arguments),) = value.items()
        else:
            name, arguments = _at(value, form.name_path), _at(value, form.arguments_path)
            holder = _at(value, form.arguments_path[:-1])
            for key in form.other_keys:
                if arguments is None and isinstance(holder, dict):
                    arguments = holder.get(key)
            if arguments is None:
                arguments = {}
        if isinstance(arguments, str):
            arguments = _read(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise MismatchError
        self._tools.check(name)
        return Piece("call", _written(arguments), name)

    def _members(self, form: ListForm, end: str, schema: Any, root: Any) -> Wait[dict[str, Any]]:
        """Reads the items of an object; the mark `end` after them comes next then."""
        found: dict[str, Any] = {}
        follow = (form.between + form.open, end)
        if not (form.begin.strip() == "" and (yield from self._ends(form, end))):
            yield from self._begin(form, end)
        while not (yield from self._ends(form, end)):
            if found:
                yield from self._text.literal(form.between)
            yield from self._text.literal(form.open)
            key = yield from self._key(form)
            item = property_of(schema, key, root)
            found[key] = yield from self._value(form, key, follow, item, root)
        return found

    def _elements(self, form: ListForm, end: str, schema: Any, root: Any) -> Wait[list[Any]]:
        found: list[Any] = []
        follow = (form.between + form.open, end)
        item = schema.get("items") if isinstance(schema, dict) else None
        yield from self._begin(form, end)
        while not (yield from self._ends(form, end)):
            if found:
                yield from self._text.literal(form.between)
            yield from self._text.literal(form.open, before_value=True)
            found.append((yield from self._value(form, "", follow, item, root)))
        return found

    def _begin(self, form: ListForm, end: str) -> Wait[None]:
        """Reads the mark before the items, which may be missing where there are none."""
        begin = self._text.literal(form.begin)
        if (yield from fits(self._text, begin)):
            return
        if not end.strip() or not (yield from self._text.comes(end)):
            raise MismatchError

    def _ends(self, form: ListForm, end: str) -> Wait[bool]:
        """Returns whether no further item comes."""
        begins = form.between + form.open
        if not end.strip():
            return not begins.strip() or not (yield from self._text.comes(begins))
        if (yield from self._text.next_character()) == "" and self._text.has_ended:
            raise EndedError
        if not (yield from self._text.comes(end)):
            return False
        # Both marks may begin alike, as `<` of a tag that is named after the key does.
        longer = len(_dense(begins)) > len(_dense(end))
        return not longer or not (yield from self._text.comes(begins))

    def _key(self, form: ListForm) -> Wait[str]:
        stops = {first_chunk(value.open) for value in form.values} - {""}
        if not stops:
            raise MismatchError
        place, _ = yield from self._text.find(tuple(stops), _MAX_NAME)
        key = self._text.text[self._text.place : place].strip()
        if not key or "\n" in key:
            raise MismatchError
        self._text.place = place
        return key

    def _value(
        self, form: ListForm, key: str, follow: tuple[str, str], schema: Any, root: Any
    ) -> Wait[Any]:
        """Reads a value with the marks around it."""
        allowed = types_of(schema, root)
        opens = sorted({value.open for value in form.values}, key=lambda mark: -len(mark.strip()))
        for mark in opens:
            values = [value for value in form.values if value.open == mark]
            values.sort(key=lambda value: value.encoding == "raw" or value.encoding == "xml")
            if allowed is not None:
                values.sort(key=lambda value: not value.types & allowed)
            begin = self._text.place
            opened = self._text.literal(mark, key=key, before_value=True)
            if not (yield from fits(self._text, opened)):
                continue
            # A literal of a type that the schema does not allow is one if nothing else fits.
            for types in dict.fromkeys((allowed, None)):
                for value in values:
                    read = self._one(value, key, follow, types, schema, root)
                    if (found := (yield from attempt(self._text, _boxed(read)))) is not None:
                        return found[0]
            self._text.place = begin
        raise MismatchError

    def _one(
        self,
        value: ValueForm,
        key: str,
        follow: tuple[str, str],
        allowed: frozenset[str] | None,
        schema: Any,
        root: Any,
    ) -> Wait[Any]:
        text = self._text
        if value.encoding == "list":
            is_object = value.types == {"object"}
            form = self._form.object if is_object else self._form.array
            assert form is not None
            read: Callable[..., Wait[Any]] = self._members if is_object else self._elements
            if self._depth == _MAX_DEPTH:
                raise MismatchError
            self._depth += 1
            try:
                found = yield from read(form, form.end + value.close, schema, root)
            finally:
                self._depth -= 1
            yield from text.literal(form.end + value.close, key=key)
            return found
        if value.encoding in ("raw", "xml") and value.close.strip():
            written = yield from self._until(value.close, key, follow)
            return value_of(written, value, allowed)
        if value.encoding in ("raw", "xml"):
            place, _ = yield from text.find(_chunks(follow))
            written, text.place = text.text[text.place : place], place
            return value_of(written.strip(), value, allowed)
        written = yield from self._literal()
        found = _read(written, is_python=True)
        if type_of(found) not in (value.types if allowed is None else value.types & allowed):
            raise MismatchError
        yield from text.literal(value.close, key=key)
        return found

    def _literal(self) -> Wait[str]:
        yield from self._text.skip_space()
        character = yield from self._text.next_character()
        if character in ("'", '"'):
            return (yield from string_literal(self._text))
        if character in ("{", "[", "("):
            return (yield from nested_literal(self._text, is_python=True))
        return (yield from bare_literal(self._text))

    def _until(self, close: str, key: str, follow: tuple[str, str]) -> Wait[str]:
        """Reads a bare text up to its closing mark, and the mark.

        A mark that nothing of the form follows is quoted in the text, and part of it.
        """
        text, begin = self._text, self._text.place
        chunk = first_chunk(close.replace("\ue003", key))
        while True:
            place, _ = yield from text.find((chunk,))
            text.place = place
            if (yield from fits(text, text.literal(close, key=key))):
                for mark in follow:
                    if (yield from text.comes(mark)):
                        written = text.text[begin:place]
                        space = close[: len(close) - len(close.lstrip())]
                        return written.removesuffix(space) if space else written
            text.place = place + 1


def _boxed(parser: Wait[Any]) -> Wait[tuple[Any]]:
    return ((yield from parser),)


def _chunks(marks: Iterable[str]) -> tuple[str, ...]:
    return tuple(chunk for mark in marks if (chunk := first_chunk(mark)))


def _written(arguments: dict[str, Any]) -> str:
    try:
        return as_json(arguments)
    except RecursionError:
        raise MismatchError from None


def _dense(mark: str) -> str:
    """Returns a mark without white space, up to its first hole."""
    return "".join(chunks(before_hole(mark)))


def _read(written: str, *, is_python: bool = False) -> Any:
    try:
        return read_literal(written) if is_python else read_json(written)
    except ValueError:
        if not is_python and written[:1] in "{[":
            try:
                return read_literal(written)
            except ValueError:
                pass
        raise MismatchError from None


def _at(value: Any, path: Iterable[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
