"""Reads the values of arguments from the text that a model wrote.

A form that writes strings bare does not say whether `3` is a number: the tool's schema does.
"""

from __future__ import annotations

import ast
import html
import json
import math
import uuid
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxpage.chat_forms.forms import JSON_TYPES, ValueForm

_MAX_LITERAL = 1 << 16  # characters that are read as Python; Python's parser nests on the C stack
_MAX_DEPTH = 64
_MAX_SCHEMA_DEPTH = 16
_SPECIAL = {"NaN", "Infinity", "-Infinity"}


class Number(float):
    """A number that no float holds, with the digits that the model wrote."""

    digits: str = ""


def read_json(text: str) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: It is no JSON, or has a number that JSON does not have.
    """
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_python(text: str) -> Any:
    """Returns the value of a literal of Python, which templates write that print a value.

    Raises:
        ValueError: It is no literal that JSON could express.
    """
    depth = text.count("[") + text.count("{") + text.count("(")
    if len(text) > _MAX_LITERAL or depth > _MAX_DEPTH:
        raise ValueError("too long for a literal")
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError("no literal") from None
    return value


def read_literal(text: str) -> Any:
    """Returns the value of a JSON text or of a literal of Python.

    Raises:
        ValueError: It is neither.
    """
    try:
        return read_json(text)
    except ValueError:
        if text.strip() in _SPECIAL:
            raise
        return read_python(text)


def as_json(value: Any) -> str:
    """Returns a value as JSON, with the digits of numbers as they were written."""
    large: dict[str, str] = {}
    text = json.dumps(_marked(value, large), ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Only an escape can express a lone surrogate.
        text = json.dumps(_marked(value, large))
    for name, digits in large.items():
        text = text.replace(f'"{name}"', digits)
    return text


def _marked(value: Any, large: dict[str, str]) -> Any:
    if isinstance(value, Number):
        large[name := uuid.uuid4().hex] = value.digits
        return name
    if isinstance(value, dict):
        return {key: _marked(one, large) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(one, large) for one in value]
    return value


def _number(digits: str) -> float:
    value = float(digits)
    if math.isfinite(value):
        return value
    large = Number(value)
    large.digits = digits
    return large


def _no_number(constant: str) -> NoReturn:
    raise ValueError(constant)


def type_of(value: Any) -> str:
    """Returns the JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def types_of(schema: Any, root: Any, depth: int = 0) -> frozenset[str] | None:
    """Returns the JSON types that a schema allows, or None if it does not say.

    Args:
        schema: The schema of a value.
        root: The schema of the arguments, which references lead into.
        depth: The number of schemas that this one is within.
    """
    if not isinstance(schema, dict) or depth > _MAX_SCHEMA_DEPTH:
        return None
    if "const" in schema:
        return frozenset({type_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of, schema["enum"]))
    declared = schema.get("type")
    if declared is not None:
        names = [declared] if isinstance(declared, str) else declared
        found = {"number" if name == "integer" else name for name in names}
        if schema.get("nullable") is True:
            found.add("null")
        return frozenset(found) & JSON_TYPES
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list):
            parts = [types_of(one, root, depth + 1) for one in schema[union]]
            known = [part for part in parts if part is not None]
            return frozenset().union(*known) if known else None
    if isinstance(schema.get("allOf"), list):
        for one in schema["allOf"]:
            if (found_in := types_of(one, root, depth + 1)) is not None:
                return found_in
    if isinstance(schema.get("$ref"), str):
        return types_of(_referred(schema["$ref"], root), root, depth + 1)
    return frozenset({"object"}) if "properties" in schema else None


def _referred(reference: str, root: Any) -> Any:
    if not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def property_of(schema: Any, key: str, root: Any) -> Any:
    """Returns the schema of a property of an object, or None if it has none."""
    for _ in range(_MAX_SCHEMA_DEPTH):
        if not isinstance(schema, dict):
            return None
        if isinstance(schema.get("properties"), dict) and key in schema["properties"]:
            return schema["properties"][key]
        if not isinstance(schema.get("$ref"), str):
            break
        schema = _referred(schema["$ref"], root)
    return schema.get("additionalProperties") if isinstance(schema, dict) else None


def value_of(text: str, form: ValueForm, allowed: frozenset[str] | None) -> Any:
    """Returns the value that stands bare in a text.

    The types are those that both the form and the schema allow. A text that reads as no value of
    another type is a string.

    Args:
        text: The text between the marks.
        form: How values of its types are written.
        allowed: The types that the tool's schema allows, or None if it does not say.
    """
    types = form.types if allowed is None or not form.types & allowed else form.types & allowed
    string = html.unescape(text) if form.encoding == "xml" else text
    if types == {"string"}:
        return string
    for spelled in dict.fromkeys((text.strip(), string.strip())):
        try:
            value = read_literal(spelled)
        except ValueError:
            value = _WORDS.get(spelled.lower(), string)
        if type_of(value) in types and type_of(value) != "string":
            return value
    return string


_WORDS = {"true": True, "false": False, "null": None, "none": None}
