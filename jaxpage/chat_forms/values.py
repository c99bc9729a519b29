"""Reads the values of arguments without quotes, by the types that the tool's schema allows.

A form that writes strings bare does not say whether `3` is a number: the schema does.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from jaxpage.chat_forms.forms import JSON_TYPES, ValueForm
from jaxpage.chat_forms.literals import read_literal
from jaxpage.chat_forms.text_buffer import MismatchError

_MAX_SCHEMA_DEPTH = 16
_WORDS = {"true": True, "false": False, "null": None, "none": None}


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


def types_of(schema: Any, root: Any) -> frozenset[str] | None:
    """Returns the JSON types that a schema allows, or None if it does not say.

    Args:
        schema: The schema of a value.
        root: The schema of the arguments, which references lead into.
    """
    return _types(schema, root, 0, set())


def _types(schema: Any, root: Any, depth: int, followed: set[str]) -> frozenset[str] | None:
    """Does the work of `types_of`.

    Args:
        schema: The schema of a value, or a part of it.
        root: The schema of the arguments.
        depth: The number of schemas that this one is within.
        followed: The references that were followed. Each is followed once, because unions of
            references to each other would take exponential time.
    """
    if not isinstance(schema, dict) or depth > _MAX_SCHEMA_DEPTH:
        return None
    if "const" in schema:
        return frozenset({type_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of, schema["enum"]))
    declared = schema.get("type")
    if isinstance(declared, str | list):
        names = [declared] if isinstance(declared, str) else declared
        # Some clients write types in capitals ("OBJECT"); where no grammar enforces a schema, it
        # may have anything.
        lowered = {name.lower() for name in names if isinstance(name, str)}
        types = {"number" if name == "integer" else name for name in lowered}
        if schema.get("nullable") is True:
            types.add("null")
        return frozenset(types) & JSON_TYPES
    for union in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(union), list):
            parts = [_types(part, root, depth + 1, followed) for part in schema[union]]
            known = [part for part in parts if part is not None]
            if union != "allOf":
                return frozenset().union(*known) if known else None
            if known:
                return known[0]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in followed:
            return None
        followed.add(reference)
        return _types(_resolve_reference(reference, root), root, depth + 1, followed)
    return frozenset({"object"}) if "properties" in schema else None


def _resolve_reference(reference: str, root: Any) -> Any:
    """Returns the part of a schema that a reference leads to, or None."""
    if not reference.startswith("#"):
        return None
    target = root
    for part in reference[1:].split("/")[1:]:
        # JSON Pointer (RFC 6901) writes "/" as ~1 and "~" as ~0; ~01 is "~1", so this order
        # matters.
        name = part.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, dict) else None
    return target


def property_of(schema: Any, key: str, root: Any) -> Any:
    """Returns the schema of a property of an object, or None if it has none."""
    for _ in range(_MAX_SCHEMA_DEPTH):
        if not isinstance(schema, dict):
            return None
        if isinstance(schema.get("properties"), dict) and key in schema["properties"]:
            return schema["properties"][key]
        if not isinstance(schema.get("$ref"), str):
            break
        schema = _resolve_reference(schema["$ref"], root)
    return schema.get("additionalProperties") if isinstance(schema, dict) else None


def value_of(text: str, form: ValueForm, allowed: frozenset[str] | None) -> Any:
    """Returns the value of a text without quotes.

    The types are those that both the form and the schema allow. A text that reads as no value of
    another type is a string.

    Args:
        text: The text between the markers.
        form: How values of its types are written.
        allowed: The types that the tool's schema allows, or None if it does not say.
    """
    # A form whose types the schema does not allow is read by its own types all the same.
    types = form.types & (allowed or form.types) or form.types
    string = html.unescape(text) if form.encoding == "xml" else text
    if types == {"string"}:
        return string
    for spelled in dict.fromkeys((text.strip(), string.strip())):
        try:
            value = read_literal(spelled)
        except MismatchError:
            value = _WORDS.get(spelled.lower(), string)
        if type_of(value) in types and type_of(value) != "string":
            return value
    return string
