"""Says in other keywords of JSON schema what llguidance has no keyword for, where that is exact.

    propertyNames: {"enum": ["a", "b"]}       properties a and b, and no others
    propertyNames: {"pattern": "^x"}          patternProperties "^x", and no others
    unevaluatedProperties: false              additionalProperties: false
    exclusiveMinimum: true, minimum: 3        exclusiveMinimum: 3 (draft 4)

A keyword that restricts nothing is removed. Everything else is left for llguidance to refuse.
"""

from __future__ import annotations

import re
from typing import Any

# Keywords whose schemas apply to the same value as the schema that has the keyword.
_IN_PLACE = frozenset(
    ("allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas", "not")
)
_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "minContains", "maxContains"),
)
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id"),
    )
)
_UUID = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
_DRAFT = re.compile(r"https?://json-schema\.org/(draft[/-][0-9-]+)/schema#?")
_DRAFT_URI = {
    "draft-04": "http://json-schema.org/draft-04/schema#",
    "draft-06": "http://json-schema.org/draft-06/schema#",
    "draft-07": "http://json-schema.org/draft-07/schema#",
    "draft/2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft/2020-12": "https://json-schema.org/draft/2020-12/schema",
}


def restate_keywords(part: dict[str, Any]) -> None:
    """Replaces keywords of one part of a schema, in place, with others that mean the same."""
    _restate_draft(part)
    _restate_counts(part)
    _restate_exclusive_bounds(part)
    _restate_unevaluated(part)
    _restate_property_names(part)
    if "if" not in part or part.keys().isdisjoint(("then", "else")):
        # The three have an effect together only.
        for name in ("if", "then", "else"):
            part.pop(name, None)
    for name in ("dependentRequired", "dependentSchemas"):
        if part.get(name) == {}:
            del part[name]
    if part.get("not", True) is False:
        del part["not"]


def _restate_draft(part: dict[str, Any]) -> None:
    """Writes `$schema` as llguidance knows it; without a known one it takes the newest draft."""
    if "$schema" not in part or isinstance(part["$schema"], dict):
        return
    draft = _DRAFT.fullmatch(str(part.pop("$schema")))
    if draft is not None and draft[1] in _DRAFT_URI:
        part["$schema"] = _DRAFT_URI[draft[1]]


def _restate_counts(part: dict[str, Any]) -> None:
    for name in _COUNTS:
        # JSON schema counts 2.0 as an integer since draft 6.
        if isinstance(count := part.get(name), float) and count == int(count):
            part[name] = int(count)


def _restate_exclusive_bounds(part: dict[str, Any]) -> None:
    """Reads the booleans of draft 4, which say whether the other bound is exclusive."""
    for name, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(is_exclusive := part.get(name), bool):
            del part[name]
            if is_exclusive and bound in part:
                part[name] = part.pop(bound)


def _restate_unevaluated(part: dict[str, Any]) -> None:
    for name, others, applies_before in (
        ("unevaluatedProperties", "additionalProperties", ()),
        ("unevaluatedItems", "items", ("contains",)),
    ):
        if name not in part:
            continue
        holder = part.get(others)
        if part[name] in (True, {}) or (others in part and not isinstance(holder, list)):
            # Everything is admitted, or the other keyword has evaluated everything already.
            del part[name]
        elif part.keys().isdisjoint((*_IN_PLACE, *applies_before)):
            part.setdefault("additionalItems" if holder is not None else others, part.pop(name))


def _restate_property_names(part: dict[str, Any]) -> None:
    if "propertyNames" not in part:
        return
    names = part["propertyNames"]
    if _admits_all_texts(names):
        del part["propertyNames"]
        return
    properties = part.get("properties", {})
    # No keyword says that a name must match two patterns.
    if (
        not isinstance(names, dict)
        or not isinstance(properties, dict)
        or "patternProperties" in part
    ):
        return
    if (listed := _list_names(names)) is not None:
        others = part.get("additionalProperties", True)
        part["properties"] = {
            **{name: schema if name in listed else False for name, schema in properties.items()},
            **{name: others for name in listed if name not in properties},
        }
    elif (pattern := _pattern_of_names(names)) is not None and not properties:
        part["patternProperties"] = {pattern: part.get("additionalProperties", True)}
    else:
        return
    part["additionalProperties"] = False
    del part["propertyNames"]


def _restrictions(names: dict[str, Any]) -> dict[str, Any]:
    """Returns the keywords that restrict a text."""
    restrictions = {name: value for name, value in names.items() if name not in _ANNOTATIONS}
    types = restrictions.get("type")
    if types == "string" or (isinstance(types, list) and "string" in types):
        del restrictions["type"]
    if restrictions.get("minLength") == 0:
        del restrictions["minLength"]
    return restrictions


def _admits_all_texts(names: Any) -> bool:
    return names is True or (isinstance(names, dict) and not _restrictions(names))


def _list_names(names: dict[str, Any]) -> list[str] | None:
    """Returns the names if the schema does nothing but list them, or None."""
    restrictions = _restrictions(names)
    if restrictions.keys() == {"const"}:
        listed = [restrictions["const"]]
    elif restrictions.keys() == {"enum"} and isinstance(restrictions["enum"], list):
        listed = restrictions["enum"]
    else:
        return None
    return [name for name in listed if isinstance(name, str)]


def _pattern_of_names(names: dict[str, Any]) -> str | None:
    """Returns the regular expression of the names if one says all, or None."""
    restrictions = _restrictions(names)
    if restrictions.keys() == {"pattern"} and isinstance(restrictions["pattern"], str):
        return restrictions["pattern"]
    if restrictions == {"format": "uuid"}:
        return _UUID
    if restrictions.keys() <= {"minLength", "maxLength"} and all(
        isinstance(length, int) and length >= 0 for length in restrictions.values()
    ):
        minimum, maximum = restrictions.get("minLength", 0), restrictions.get("maxLength", "")
        return f"^[\\s\\S]{{{minimum},{maximum}}}$"
    return None
