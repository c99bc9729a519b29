"""Checks the JSON schemas of requests before anything else reads them.

The compiler of grammars finds out later what a grammar cannot express.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn
from urllib.parse import unquote

from jaxpage.decoding import find_unsupported_keyword
from jaxpage.serving.wire.errors import ApiError
from jaxpage.settings.argument_checks import show
from jaxpage.settings.structured_outputs import MAX_CHARACTERS

MAX_SCHEMA_DEPTH = 64
_TYPES = {"null", "boolean", "object", "array", "number", "integer", "string"}
IS_NOT_REGULAR = "looks around or back, which is not supported"
# Look-around and back-references. This is matched only outside of classes and escapes.
_BEYOND_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!]|P[=>])|\\(?:[1-9]|k<|[bB])")
_PLAIN_KEY = re.compile(r"[\w-]{1,64}", re.ASCII)
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
NAMED_SCHEMAS = (
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


def check_schema(schema: Any, param: str) -> None:
    """Raises ApiError for a schema that is too large or deep, or that is not valid.

    A schema is not valid if it names a type that does not exist, has a pattern that is plainly
    wrong or that looks around or back, or refers to anything outside itself: nothing is ever
    fetched. The message begins with the path of what is at fault.

    Args:
        schema: The schema.
        param: The field that the schema came from.
    """
    if not isinstance(schema, dict):
        _refuse(f"{show(schema)} is not a JSON schema that is an object", param, param)
    if len(json.dumps(schema)) > MAX_CHARACTERS:
        _refuse(f"at most {MAX_CHARACTERS} characters of JSON are allowed", param, param)
    for part, depth, path in parts_of(schema, param):
        if depth > MAX_SCHEMA_DEPTH:
            _refuse(f"nested more than {MAX_SCHEMA_DEPTH} deep", param, param)
        if not isinstance(part, dict | bool):
            _refuse(f"{show(part)} is not a JSON schema", path, path)
        if isinstance(part, dict):
            _check_part(part, path, param)


def _check_part(part: dict[str, Any], path: str, param: str) -> None:
    # The client's field is named for a fault of the whole schema, and the path for one in a part.
    is_whole = path == param

    def refuse(problem: str, keyword: str) -> None:
        place = f"{path}.{keyword}"
        _refuse(problem, place, param if is_whole else place)

    types = part.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in _TYPES:
            refuse(f"type {show(name)} is none of JSON's", "type")
    for name in _REFERENCES:
        reference = part.get(name, "#")
        if not isinstance(reference, str) or not reference.startswith("#"):
            refuse(
                f"{name} {show(reference)} is not within the schema; external references are "
                "not fetched",
                name,
            )
    if "pattern" in part and (problem := problem_of_pattern(part["pattern"])):
        refuse(f"pattern {show(part['pattern'])} {problem}", "pattern")
    # What is wrong with the whole schema, the compiler of grammars says as well.
    if not is_whole and (keyword := find_unsupported_keyword(part)) is not None:
        refuse(f"no grammar can enforce {keyword}, which is not supported", keyword)
    for pattern in dict_of(part, "patternProperties"):
        if problem := problem_of_pattern(pattern):
            refuse(f"pattern {show(pattern)} {problem}", "patternProperties")


def _refuse(problem: str, place: str, param: str) -> NoReturn:
    raise ApiError(400, f"{place}: {problem}", param=param)


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
        together = [*list_of(part, "allOf"), target_of(root, part.get("$ref", "#nothing"))]
        choices = [list_of(part, name) for name in ("anyOf", "oneOf") if name in part]
        return all(admits(subschema, root, depth) for subschema in together) and all(
            any(admits(subschema, root, depth) for subschema in choice) for choice in choices
        )

    return admits(schema, schema, 1)


def parts_of(schema: Any, path: str = "") -> Iterator[tuple[Any, int, str]]:
    """Yields the schema and all schemas in it, each with its depth and its path.

    Those that keywords hold come first, then those that only references lead to.
    """
    waiting: list[tuple[Any, Any, int, str]] = [(schema, schema, 1, path)]
    referred: list[tuple[Any, Any, int, str]] = []
    seen = set()
    while waiting or referred:
        part, root, depth, path = (waiting or referred).pop()
        if id(part) in seen:
            continue
        yield part, depth, path
        if not isinstance(part, dict):
            continue
        seen.add(id(part))
        root = _root_of(part, root)
        waiting += [(inner, root, depth + 1, path + step) for step, inner in _inner(part)]
        if isinstance(reference := part.get("$ref"), str):
            target = target_of(root, reference)
            referred.append((target, root, 1 + reference.count("/"), f"{path}.$ref"))


def _inner(part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the schemas that the keywords of a schema hold, each with its path from there."""
    for name in _SCHEMAS:
        if name in part and not isinstance(part[name], list):
            yield f".{name}", part[name]
    for name in _LISTED_SCHEMAS + _SCHEMAS:
        for index, inner in enumerate(list_of(part, name)):
            yield f".{name}[{index}]", inner
    for name in NAMED_SCHEMAS:
        if isinstance(part.get(name), dict):
            for key, inner in part[name].items():
                if name != "dependencies" or not isinstance(inner, list):
                    yield f".{name}{_step(key)}", inner


def _step(key: str) -> str:
    return f".{key}" if _PLAIN_KEY.fullmatch(key) else f"[{json.dumps(key)}]"


def _root_of(part: dict[str, Any], root: Any) -> Any:
    """Returns the schema at which the references in a part begin.

    This is the innermost schema around the part that has an "$id", or the whole schema.
    """
    return part if "$id" in part else root


def target_of(root: Any, reference: Any) -> Any:
    """Returns the part that a reference leads to by a JSON pointer.

    If the pointer leads nowhere, or the reference begins with an anchor's name, the part is True,
    the schema that admits everything.
    """
    anchor, *steps = unquote(str(reference).removeprefix("#")).split("/")
    target = root
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        if (
            isinstance(target, list)
            and re.fullmatch("[0-9]{1,5}", name)
            and int(name) < len(target)
        ):
            target = target[int(name)]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        else:
            return True
    return True if anchor else target


def list_of(part: dict[str, Any], name: str) -> list[Any]:
    """Returns a keyword's list; an empty one if it has something else, which is refused."""
    value = part.get(name)
    return value if isinstance(value, list) else []


def dict_of(part: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a keyword's object; an empty one if it has something else, which is refused."""
    value = part.get(name)
    return value if isinstance(value, dict) else {}


def problem_of_pattern(pattern: Any) -> str | None:
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
    for index, character in enumerate(pattern):
        if not (escaped or in_class) and _BEYOND_REGULAR.match(pattern, index):
            return IS_NOT_REGULAR
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
