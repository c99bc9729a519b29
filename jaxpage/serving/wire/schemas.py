"""JSON schemas of requests, looked over before anything else sees them; what a grammar cannot express is for its compiler to say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from jaxpage.argument_checks import shown
from jaxpage.serving.wire.errors import ApiError
from jaxpage.structured_outputs import MAX_CHARACTERS

MAX_SCHEMA_DEPTH = 64
_TYPES = {"null", "boolean", "object", "array", "number", "integer", "string"}
_BEYOND_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!]|P[=>])|\\(?:[1-9]|k<)")  # where no class is open and nothing escaped
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = (
    "items",
    "additionalProperties",
    "additionalItems",
    "not",
    "contains",
    "if",
    "then",
    "else",
    "propertyNames",
)


def check_schema(schema: dict[str, Any], param: str) -> None:
    """Raises ApiError if it is too large or deep, names a type that there is not, has a pattern that is no regular expression, or
    refers to anything outside itself: nothing is ever fetched."""

    def refuse(what: str) -> None:
        raise ApiError(400, f"{param}: {what}", param=param)

    if len(json.dumps(schema)) > MAX_CHARACTERS:
        refuse(f"at most {MAX_CHARACTERS} characters of JSON are allowed")
    for part, depth in _parts(schema):
        if depth > MAX_SCHEMA_DEPTH:
            refuse(f"nested more than {MAX_SCHEMA_DEPTH} deep")
        if not isinstance(part, dict | bool):
            refuse(f"{shown(part)} is no JSON schema")
        if not isinstance(part, dict):
            continue
        types = part.get("type", [])
        for name in types if isinstance(types, list) else [types]:
            if not isinstance(name, str) or name not in _TYPES:
                refuse(f"type {shown(name)} is none of JSON's")
        reference = part.get("$ref", "#")
        if not isinstance(reference, str) or not reference.startswith("#"):
            refuse(f"$ref {shown(reference)} is not within the schema; nothing is fetched")
        for pattern in [part[name] for name in ("pattern",) if name in part] + list(_keys(part, "patternProperties")):
            if problem := _problem_of(pattern):
                refuse(f"pattern {shown(pattern)} {problem}")


def _parts(schema: Any) -> Iterator[tuple[Any, int]]:
    """The schema and all schemas in it, with their depths."""
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        part, depth = waiting.pop()
        yield part, depth
        if isinstance(part, dict):
            inside = [part[name] for name in _SCHEMAS if name in part and not isinstance(part[name], list)]
            for name in _LISTED_SCHEMAS + _SCHEMAS:
                if isinstance(part.get(name), list):
                    inside += part[name]
            for name in _NAMED_SCHEMAS:
                if isinstance(part.get(name), dict):
                    inside += part[name].values()
            waiting += [(one, depth + 1) for one in inside]


def _keys(part: dict[str, Any], name: str) -> Iterator[str]:
    found = part.get(name)
    yield from found if isinstance(found, dict) else ()


def _problem_of(pattern: Any) -> str | None:
    """What is plainly wrong with a pattern. It is not compiled: that can take for ever, and the grammars' compiler has limits."""
    if not isinstance(pattern, str):
        return "is no string"
    depth, in_class, escaped, may_repeat = 0, False, False, False
    for place, character in enumerate(pattern):
        if not (escaped or in_class) and _BEYOND_REGULAR.match(pattern, place):
            return "looks around or back, which is not supported"
        if escaped or in_class:
            in_class, escaped = in_class and (escaped or character != "]"), not escaped and character == "\\"
            may_repeat = True
        elif (character in "*+" and not may_repeat) or (character == ")" and depth == 0):
            return "is no regular expression"
        else:
            depth += (character == "(") - (character == ")")
            in_class, escaped, may_repeat = character == "[", character == "\\", character not in "(|"
    return "is no regular expression" if depth or in_class or escaped else None
