"""Reads one tool call by its form."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from jaxpage.chat_forms.forms import ListForm, ToolForm, ValueForm
from jaxpage.chat_forms.literals import literal, read_literal, read_nested_literal
from jaxpage.chat_forms.markers import (
    KEY,
    before_placeholder,
    chunks,
    first_chunk,
    leading_space,
)
from jaxpage.chat_forms.pieces import AnswerPiece
from jaxpage.chat_forms.text_buffer import (
    EndedError,
    MismatchError,
    Parser,
    TextBuffer,
    attempt,
    fits,
)
from jaxpage.chat_forms.tools import Tools
from jaxpage.chat_forms.values import property_of, type_of, types_of, value_of

_MAX_NAME = 256  # characters of a name or a key
_MAX_DEPTH = 32  # of lists within lists that are not written as JSON


class CallReader:
    """Reads calls of one form from a text that grows."""

    def __init__(
        self, form: ToolForm, tools: Tools, buffer: TextBuffer, tails: tuple[str, ...] = ()
    ) -> None:
        """Makes the reader of calls.

        Args:
            form: The form of calls.
            tools: The tools that may be called.
            buffer: The text.
            tails: The markers that an answer may end with.
        """
        self.form = form
        self._tools = tools
        self._buffer = buffer
        # One of these follows a call whose closing marker is missing.
        follow = (form.opening, form.open, form.between + form.open, form.end, *tails)
        self._follow = tuple({marker for marker in follow if marker.strip()})
        # A further call ends the one before it, also where its closing marker is missing. Only a
        # tag does so: other openings could be a part of any text.
        openings = (form.opening, form.between + form.open)
        self._openings = tuple(text for text in openings if re.match(r"\s*[<\[]", text))
        self._schema: Any = None  # of the arguments of the call, which references lead into
        self._depth = 0  # of lists that are not written as JSON
        # Where all closing markers of a value are quoted, by the marker and those after it: the
        # begin and the end in the whole answer.
        self._quoted: dict[tuple[str, tuple[str, str]], tuple[int, int]] = {}

    def call(self, opened: str, close: str | None = None) -> Parser[AnswerPiece]:
        """Reads a call with the markers around it.

        A text that ends within the closing marker is complete if nothing else could follow.

        Args:
            opened: The marker before the call.
            close: The marker after it; None for that of the form.

        Raises:
            MismatchError: The text is no call of a tool.
        """
        form, buffer = self.form, self._buffer
        close = form.close if close is None else close
        yield from buffer.literal(opened)
        if form.payload == "object":
            piece = self._object((yield from self._json(close)))
        else:
            name = yield from self._name()
            if form.payload == "json":
                yield from buffer.literal(form.mid, name)
                piece = yield from self.json_call(name, close)
            else:
                assert form.arguments is not None
                self._schema = self._tools.schema(name)
                arguments = yield from self._members(form.arguments, close, self._schema)
                piece = self._tools.call(name, arguments)
        yield from self._close(close, piece.name)
        return piece

    def _close(self, close: str, name: str) -> Parser[None]:
        """Reads the marker after a call, which may be missing if it is certain that the call ends.

        Raises:
            MismatchError: Something else comes.
        """
        form, buffer = self.form, self._buffer
        if form.arguments is None:
            yield from fits(buffer, self._extra_braces(close))
        begin = buffer.position
        try:
            yield from buffer.literal(close, name)
        except EndedError:
            if form.arguments is not None and not self._is_past_items(buffer.text[begin:], close):
                raise
            buffer.position = len(buffer.text)
        except MismatchError:
            buffer.position = begin
            if not (yield from self._next_part_comes()):
                raise
        else:
            # Without a closing marker only what follows shows that the arguments are complete.
            if (
                form.arguments is not None
                and not close
                and not (yield from self._next_part_comes())
            ):
                raise MismatchError

    def _extra_braces(self, close: str) -> Parser[None]:
        """Reads braces after JSON that are too many, if what comes then shows that they are.

        Raises:
            MismatchError: There are none.
        """
        buffer = self._buffer
        yield from buffer.literal("}")
        while (yield from fits(buffer, buffer.literal("}"))):
            pass
        begin = buffer.position
        if close.strip() and (yield from buffer.comes(close)):
            return
        if not (yield from self._next_part_comes()):
            raise MismatchError
        buffer.position = begin

    def _next_part_comes(self) -> Parser[bool]:
        """Returns whether a further call comes, or the marker after all calls or the answer."""
        yield from self._buffer.skip_space()
        if (yield from self._buffer.next_character()) == "":
            return False
        for marker in self._follow:
            if (yield from self._buffer.comes(marker)):
                return True
        return False

    def json_call(self, name: str, close: str = "") -> Parser[AnswerPiece]:
        """Reads the JSON arguments of a call whose name was read.

        Args:
            name: The name.
            close: The marker after the arguments.

        Raises:
            MismatchError: They are no object, or no tool has this name.
        """
        self._tools.resolve(name)
        return self._tools.call(name, (yield from self._json(close)))

    def _json(self, close: str) -> Parser[Any]:
        """Reads an object, or a text that has one."""
        buffer = self._buffer
        yield from buffer.skip_space()
        is_text = self.form.payload == "json" and (yield from buffer.next_character()) in ("'", '"')
        if is_text:
            return read_literal((yield from literal(buffer)))
        after = first_chunk(close or self.form.close or self.form.end)
        return read_literal((yield from read_nested_literal(buffer, close=after)))

    def _is_past_items(self, following: str, close: str) -> bool:
        """Returns whether a part of the closing marker shows that no further item comes."""
        items = self.form.arguments
        assert items is not None
        item = _without_space(items.between + items.open)
        return not close.strip() or not item.startswith(_without_space(following))

    def _name(self) -> Parser[str]:
        """Reads the name of a tool, which ends where the next marker begins."""
        form, buffer, items = self.form, self._buffer, self.form.arguments
        stops = [first_chunk(form.mid) or "{"]
        if items is not None:
            markers = (items.begin + items.open, items.begin + form.close)
            stops = [first_chunk(marker) or marker[:1] for marker in markers if marker]
        yield from buffer.skip_space()
        end, _ = yield from buffer.find(tuple(stops), _MAX_NAME)
        name = buffer.text[buffer.position : end].strip()
        # Where any name is a tool's, words of prose are none.
        if self._tools.schemas is None and any(character.isspace() for character in name):
            raise MismatchError
        self._tools.resolve(name)
        buffer.position = end
        return name

    def _object(self, value: Any) -> AnswerPiece:
        """Returns the call that a JSON object is.

        Raises:
            MismatchError: It names no tool, or its arguments are no object.
        """
        form = self.form
        if not form.name_path:
            if not isinstance(value, dict) or len(value) != 1:
                raise MismatchError
            ((name, arguments),) = value.items()
            return self._tools.call(name, arguments)
        is_usual = True
        if _at(value, form.name_path) is None and isinstance(value, dict):
            # The object of a request's own form, `{"type": "function", "function": {...}}`.
            value = value.get("function")
            is_usual = False
        arguments = _at(value, form.arguments_path)
        if arguments is None:
            *outer, _ = form.arguments_path
            values = (_at(value, (*outer, key)) for key in form.other_keys)
            arguments = next(
                (key_of_arguments for key_of_arguments in values if key_of_arguments is not None),
                None,
            )
            is_usual = False
        if not is_usual and _is_schema(arguments):
            raise MismatchError  # the definition of a tool, which a model may quote
        return self._tools.call(_at(value, form.name_path), arguments)

    def _members(self, form: ListForm, end: str, schema: Any) -> Parser[dict[str, Any]]:
        """Reads the items of an object; the marker `end` after them comes next then."""
        members: dict[str, Any] = {}
        if form.begin.strip() or not (yield from self._ends(form, end)):
            yield from self._begin(form, end)
        while not (yield from self._ends(form, end)):
            if members:
                yield from self._buffer.literal(form.between)
            yield from self._buffer.literal(form.open)
            key = yield from self._key(form)
            item = property_of(schema, key, self._schema)
            members[key] = yield from self._value(form, end, key, item)
        return members

    def _elements(self, form: ListForm, end: str, schema: Any) -> Parser[list[Any]]:
        """Reads the elements of an array; the marker `end` after them comes next then."""
        elements: list[Any] = []
        item = schema.get("items") if isinstance(schema, dict) else None
        yield from self._begin(form, end)
        while not (yield from self._ends(form, end)):
            if elements:
                yield from self._buffer.literal(form.between)
            yield from self._buffer.literal(form.open, before_value=True)
            elements.append((yield from self._value(form, end, "", item)))
        return elements

    def _begin(self, form: ListForm, end: str) -> Parser[None]:
        """Reads the marker before the items, which may be missing where there are none."""
        if (yield from fits(self._buffer, self._buffer.literal(form.begin))):
            return
        if not end.strip() or not (yield from self._buffer.comes(end)):
            raise MismatchError

    def _ends(self, form: ListForm, end: str) -> Parser[bool]:
        """Returns whether no further item comes."""
        begins = form.between + form.open
        if not end.strip():
            return not begins.strip() or not (yield from self._buffer.comes(begins))
        if (yield from self._buffer.next_character()) == "":
            raise EndedError
        if not (yield from self._buffer.comes(end)):
            return False
        # Both markers may begin alike, as `<` of a tag that is named after the key does.
        longer = len(_without_space(begins)) > len(_without_space(end))
        return not longer or not (yield from self._buffer.comes(begins))

    def _key(self, form: ListForm) -> Parser[str]:
        stops = _first_chunks(value.open for value in form.values)
        end, _ = yield from self._buffer.find(stops, _MAX_NAME)
        key = self._buffer.text[self._buffer.position : end].strip()
        # In a call as Python writes it, a bracket before the sign of a key begins another call.
        if not key or "\n" in key or ("(" in key and form.begin.strip() == "("):
            raise MismatchError
        self._buffer.position = end
        return key

    def _value(self, form: ListForm, end: str, key: str, schema: Any) -> Parser[Any]:
        """Reads a value with the markers around it.

        Args:
            form: The form of the list that the value is in.
            end: The marker after the list.
            key: The key of the value.
            schema: The schema of the value.
        """
        buffer, begin = self._buffer, self._buffer.position
        follow = (form.between + form.open, end)
        allowed = types_of(schema, self._schema)
        # One marker may begin as another does, so the longest is tried first.
        opens = sorted({value.open for value in form.values}, key=lambda open: -len(open.strip()))
        for opened in opens:
            if not (yield from fits(buffer, buffer.literal(opened, key=key, before_value=True))):
                continue
            values = [value for value in form.values if value.open == opened]
            # A bare text fits anything, so literals are tried before it. The second sort keeps
            # their order.
            values.sort(key=lambda value: value.is_bare)
            if allowed is not None:
                values.sort(key=lambda value: not value.types & allowed)
            ways = [(value, allowed) for value in values]
            if allowed is not None:
                # A literal of a type that the schema does not allow is one if nothing else fits.
                ways += [(value, None) for value in values if value.is_literal]
            for value, types in ways:
                read = _box(self._value_as(value, key, follow, types, schema))
                if (result := (yield from attempt(buffer, read))) is not None:
                    return result[0]
            buffer.position = begin
        raise MismatchError

    def _value_as(
        self,
        form: ValueForm,
        key: str,
        follow: tuple[str, str],
        allowed: frozenset[str] | None,
        schema: Any,
    ) -> Parser[Any]:
        """Reads a value of one form, with the marker after it.

        Args:
            form: The form of the value.
            key: Its key.
            follow: The markers of which one comes after it.
            allowed: The types that it may have; None for those of the form.
            schema: Its schema.
        """
        buffer = self._buffer
        if form.encoding == "list":
            return (yield from self._list(form, key, schema))
        if form.is_literal:
            value = read_literal((yield from literal(buffer)))
            if type_of(value) not in (form.types if allowed is None else form.types & allowed):
                raise MismatchError
            yield from buffer.literal(form.close, key=key)
            return value
        if form.close.strip():
            text = yield from self._until(form.close, key, follow)
        else:
            end, _ = yield from buffer.find(_first_chunks(follow))
            text = buffer.text[buffer.position : end].strip()
            buffer.position = end
        return value_of(text, form, allowed)

    def _list(self, value: ValueForm, key: str, schema: Any) -> Parser[Any]:
        """Reads an array or an object that is no literal, with the marker after it."""
        if self._depth == _MAX_DEPTH:
            raise MismatchError
        form = self.form.list_of(value)
        end = form.end + value.close
        self._depth += 1
        try:
            if value.types == {"object"}:
                members: Any = yield from self._members(form, end, schema)
            else:
                members = yield from self._elements(form, end, schema)
        finally:
            self._depth -= 1
        yield from self._buffer.literal(end, key=key)
        return members

    def _until(self, close: str, key: str, follow: tuple[str, str]) -> Parser[str]:
        """Reads a bare text up to its closing marker, and the marker.

        A marker that nothing of the form follows is quoted in the text, and part of it.
        """
        buffer, begin = self._buffer, self._buffer.position
        close = close.replace(KEY, key)
        stop = first_chunk(close)
        start = buffer.num_forgotten + begin
        first, last = self._quoted.get((close, follow), (0, 0))
        if first <= start < last:
            # An earlier attempt has found no end of a text up to there.
            start, buffer.position = first, last - buffer.num_forgotten
        while True:
            end, _ = yield from buffer.find((stop,))
            buffer.position = end
            if (yield from fits(buffer, buffer.literal(close, key=key))):
                for marker in (*follow, *self._openings):
                    if (yield from buffer.comes(marker)):
                        return buffer.text[begin:end].removesuffix(leading_space(close))
            buffer.position = end + 1
            self._quoted[close, follow] = (start, buffer.num_forgotten + end + 1)


def _is_schema(arguments: Any) -> bool:
    """Returns whether an object is the schema of arguments."""
    return isinstance(arguments, dict) and {"type", "properties"} <= arguments.keys()


def _box(parser: Parser[Any]) -> Parser[tuple[Any]]:
    """Returns a parser of a value that may be None."""
    return ((yield from parser),)


def _first_chunks(markers: Iterable[str]) -> tuple[str, ...]:
    return tuple({chunk for marker in markers if (chunk := first_chunk(marker))})


def _without_space(marker: str) -> str:
    """Returns a marker without white space, up to its first placeholder."""
    return "".join(chunks(before_placeholder(marker)))


def _at(value: Any, path: Iterable[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
