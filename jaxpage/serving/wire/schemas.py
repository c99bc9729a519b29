"""Checks the JSON schemas of requests before anything else reads them.

The compiler of grammars finds out later what a grammar cannot express.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.argument_checks import shown
from jaxpage.settings.structured_outputs import MAX_CHARACTERS

MAX_SCHEMA_DEPTH = 64
_TYPES = {"null", "boolean", "object", "array", "number", "integer", "string"}
# Look-around and back-references. This is matched only outside of classes and escapes.
_BEYOND_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!]|P[=>])|\\(?:[1-9]|k<)")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_NAMED_SCHEMAS = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
)
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
    "unevaluatedProperties",
    "unevaluatedItems",
    "contentSchema",
)


def check_schema(schema: dict[str, Any], param: str) -> None:
    """Raises ApiError for a schema that is too large or deep, or that is not valid.

    A schema is not valid if it names a type that does not exist, has a pattern that is plainly
    wrong or that looks around or back, or refers to anything outside itself: nothing is ever
    fetched.

    Args:
        schema: The schema.
        param: The field that the schema came from.
    """

    def refuse(what: str) -> None:
        raise ApiError(400, f"{param}: {what}", param=param)

    if len(json.dumps(schema)) > MAX_CHARACTERS:
        refuse(f"at most {MAX_CHARACTERS} characters of JSON are allowed")
    for part, depth in _parts(schema):
        if depth > MAX_SCHEMA_DEPTH:
            refuse(f"nested more than {MAX_SCHEMA_DEPTH} deep")
        if not isinstance(part, dict | bool):
            refuse(f"{shown(part)} is not a JSON schema")
        if not isinstance(part, dict):
            continue
        types = part.get("type", [])
        for name in types if isinstance(types, list) else [types]:
            if not isinstance(name, str) or name not in _TYPES:
                refuse(f"type {shown(name)} is none of JSON's")
        for name in _REFERENCES:
            reference = part.get(name, "#")
            if not isinstance(reference, str) or not reference.startswith("#"):
                refuse(
                    f"{name} {shown(reference)} is not within the schema; external references are not fetched"
                )
        for pattern in [part[name] for name in ("pattern",) if name in part] + list(
            _keys(part, "patternProperties")
        ):
            if problem := _problem_of(pattern):
                refuse(f"pattern {shown(pattern)} {problem}")


def without_sets(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of the schema without `uniqueItems: true` in any of its parts."""
    relaxed = copy.deepcopy(schema)
    for part, _ in _parts(relaxed):
        if isinstance(part, dict) and part.get("uniqueItems") is True:
            del part["uniqueItems"]
    return relaxed


def admits_object(schema: dict[str, Any]) -> bool:
    """Returns whether the types and constants of the schema admit an object.

    Other keywords may still exclude objects; the compiler of grammars finds that.
    """
    known: dict[int, bool] = {}

    def admits(part: Any, root: Any, depth: int) -> bool:
        if not isinstance(part, dict) or depth > MAX_SCHEMA_DEPTH:
            return part is not False
        if id(part) not in known:
            # A reference that leads back to this part adds no condition.
            known[id(part)] = True
            known[id(part)] = leaves_object(part, _root_of(part, root), depth + 1)
        return known[id(part)]

    def leaves_object(part: dict[str, Any], root: Any, depth: int) -> bool:
        types = part.get("type", "object")
        values = [part["const"]] if "const" in part else part.get("enum")
        if "object" not in (types if isinstance(types, list) else [types]):
            return False
        if isinstance(values, list) and not any(isinstance(value, dict) for value in values):
            return False
        together = [*_list(part, "allOf"), _target(root, part.get("$ref", "#nothing"))]
        choices = [_list(part, name) for name in ("anyOf", "oneOf") if name in part]
        return all(admits(one, root, depth) for one in together) and all(
            any(admits(one, root, depth) for one in choice) for choice in choices
        )

    return admits(schema, schema, 1)


def _parts(schema: Any) -> Iterator[tuple[Any, int]]:
    """Yields the schema and all schemas in it, each with its depth.

    Those that keywords hold come first, then those that only references lead to.
    """
    waiting: list[tuple[Any, Any, int]] = [(schema, schema, 1)]
    referred: list[tuple[Any, Any, int]] = []
    seen = set()
    while waiting or referred:
        part, root, depth = (waiting or referred).pop()
        if id(part) in seen:
            continue
        yield part, depth
        if not isinstance(part, dict):
            continue
        seen.add(id(part))
        root = _root_of(part, root)
        inside = [
            part[name] for name in _SCHEMAS if name in part and not isinstance(part[name], list)
        ]
        for name in _LISTED_SCHEMAS + _SCHEMAS:
            inside += _list(part, name)
        for name in _NAMED_SCHEMAS:
            if isinstance(part.get(name), dict):
                inside += [
                    one
                    for one in part[name].values()
                    if name != "dependencies" or not isinstance(one, list)
                ]
        waiting += [(one, root, depth + 1) for one in inside]
        if isinstance(reference := part.get("$ref"), str):
            referred.append((_target(root, reference), root, 1 + reference.count("/")))


def _root_of(part: dict[str, Any], root: Any) -> Any:
    """Returns the schema at which the references in a part begin.

    This is the innermost schema around the part that has an "$id", or the whole schema.
    """
    return part if "$id" in part else root


def _target(root: Any, reference: Any) -> Any:
    """Returns the part that a reference leads to by a JSON pointer.

    If the pointer leads nowhere, or the reference begins with an anchor's name, the part is True,
    the schema that admits everything.
    """
    anchor, *steps = unquote(str(reference).removeprefix("#")).split("/")
    found = root
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and re.fullmatch("[0-9]{1,5}", name) and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return True
    return True if anchor else found


def _list(part: dict[str, Any], name: str) -> list[Any]:
    found = part.get(name)
    return found if isinstance(found, list) else []


def _keys(part: dict[str, Any], name: str) -> Iterator[str]:
    found = part.get(name)
    yield from found if isinstance(found, dict) else ()


def _problem_of(pattern: Any) -> str | None:
    """Returns the plain fault of a pattern, or None.

    The pattern is not compiled here, because that can take for ever; the compiler of grammars has
    limits.
    """
    if not isinstance(pattern, str):
        return "is not a string"
    depth = 0
    in_class = False
    escaped = False
    may_repeat = False
    for place, character in enumerate(pattern):
        if not (escaped or in_class) and _BEYOND_REGULAR.match(pattern, place):
            return "looks around or back, which is not supported"
        if escaped or in_class:
            in_class = in_class and (escaped or character != "]")
            escaped = not escaped and character == "\\"
            may_repeat = True
        elif (character in "*+" and not may_repeat) or (character == ")" and depth == 0):
            return "is not a valid regular expression"
        else:
            depth += (character == "(") - (character == ")")
            in_class = character == "["
            escaped = character == "\\"
            may_repeat = character not in "(|"
    return "is not a valid regular expression" if depth or in_class or escaped else None
