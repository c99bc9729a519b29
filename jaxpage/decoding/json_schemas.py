"""Rewrites JSON schemas so that llguidance enforces them exactly, or refuses them.

A rewritten schema admits nothing that the given one does not admit. It may admit less where it has
numbers: llguidance calculates with floats, which are exact up to 2^53.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from jaxpage.decoding.schema_keywords import restate_keywords

_MAXIMUM = 2**53 - 1  # up to here each integer has a float of its own
_STEP = 1e-9  # the distance from an exclusive bound to the first allowed number
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MERGED = ("allOf", "anyOf", "oneOf", "$ref")
_SINGLE = (
    *("items", "additionalProperties", "additionalItems", "not", "contains", "if", "then", "else"),
    *("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)
_UNSUPPORTED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems"),
    *("$dynamicRef", "$recursiveRef"),
)
# Formats that llguidance enforces.
_ENFORCED = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
# Formats that restrict nothing in the text: they only tell a program how to use the value.
_LABELS = frozenset(
    (
        "password",
        "binary",
        "byte",
        "path",
        "file-path",
        "directory-path",
        "int32",
        "int64",
        "float",
        "double",
    )
)
_UUID = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-%s[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
_PATTERNS = {  # formats that pydantic writes and llguidance lacks
    **{f"uuid{version}": f"^{_UUID % version}$" for version in (1, 3, 4, 5, 6, 7, 8)},
    "base64": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "base64url": "^([A-Za-z0-9_-]{4})*([A-Za-z0-9_-]{2}(==)?|[A-Za-z0-9_-]{3}=?)?$",
}
ENFORCED_FORMATS = _ENFORCED | _PATTERNS.keys()
KNOWN_FORMATS = ENFORCED_FORMATS | _LABELS


def enforceable(schema: str) -> str:
    """Returns the schema in the form that llguidance enforces.

    Raises:
        ValueError: llguidance could not enforce a keyword, which the message names.
    """
    try:
        return json.dumps(_rewritten(json.loads(schema)))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def find_unsupported_keyword(part: dict[str, Any]) -> str | None:
    """Returns a keyword of one part of a schema that llguidance has not, or None.

    `uniqueItems` is not among them: the caller may leave it out.
    """
    restated = dict(part)
    if "propertyNames" in part:
        restated["propertyNames"] = _rewritten(part["propertyNames"])
    restate_keywords(restated)
    _rewrite_counts(restated)
    return next((keyword for keyword in _UNSUPPORTED if keyword in restated), None)


def overlapping(schema: str) -> Iterator[tuple[str, str]]:
    """Yields each property of a schema with each pattern of `patternProperties` in the same object.

    A name that both cover would have to satisfy two schemas, and llguidance fails on that while it
    generates.
    """
    for part in _parts(json.loads(schema)):
        names = part.get("properties")
        patterns = part.get("patternProperties")
        if isinstance(names, dict) and isinstance(patterns, dict):
            yield from ((name, pattern) for name in names for pattern in patterns)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(schema, dict):
        return
    yield schema
    for name in _NAMED:
        if isinstance(held := schema.get(name), dict):
            for part in held.values():
                yield from _parts(part)
    for name in {*_LISTED, *_SINGLE}:
        held = schema.get(name)
        for part in held if isinstance(held, list) else [held]:
            yield from _parts(part)


def _rewritten(schema: Any, *, is_merged: bool = False) -> Any:
    """Returns a part of a schema in the form that llguidance enforces.

    Args:
        schema: The part; anything but an object is returned unchanged.
        is_merged: True if bounds from elsewhere in the schema may apply to this part too.
    """
    if not isinstance(schema, dict):
        return schema
    part = dict(schema)
    for name in _NAMED:
        if isinstance(held := part.get(name), dict):
            # The `$ref` to a definition may stand beside bounds of its own.
            is_definition = name in ("$defs", "definitions")
            part[name] = {
                key: _rewritten(inner, is_merged=is_definition) for key, inner in held.items()
            }
    for name in {*_LISTED, *_SINGLE} & part.keys():
        held = part[name]
        merges = name in _MERGED
        part[name] = (
            [_rewritten(inner, is_merged=merges) for inner in held]
            if isinstance(held, list)
            else _rewritten(held)
        )
    _check_values(part)
    restate_keywords(part)
    _rewrite_counts(part)
    _rewrite_format(part)
    _rewrite_bounds(part, is_merged=is_merged or not part.keys().isdisjoint(_MERGED))
    return part


def _check_values(part: dict[str, Any]) -> None:
    for name in ("const", "enum", "multipleOf"):
        if name in part and (number := _inexact(part[name])) is not None:
            raise ValueError(
                f"{name} has {number}, which is beyond 2^53 and no float; integers as large are "
                "not supported"
            )


def _inexact(value: Any) -> int | None:
    """Returns the first integer in a value that llguidance would round, or None."""
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return next((reason for part in inside if (reason := _inexact(part)) is not None), None)
    # `float` raises an error for more than about 1.8e308.
    if (
        isinstance(value, int)
        and abs(value) > _MAXIMUM
        and (abs(value) > 10**300 or int(float(value)) != value)
    ):
        return value
    return None


def _rewrite_counts(part: dict[str, Any]) -> None:
    if part.get("uniqueItems") is False:
        del part["uniqueItems"]
    if "contains" not in part:
        part.pop("minContains", None)  # without `contains` both have no effect
        part.pop("maxContains", None)
    elif part.get("minContains") == 0 and "maxContains" not in part:
        del part["contains"], part["minContains"]


def _rewrite_format(part: dict[str, Any]) -> None:
    kind = part.get("format")
    if not isinstance(kind, str):
        return
    if kind in _LABELS or (kind not in KNOWN_FORMATS and isinstance(part.get("pattern"), str)):
        # A pattern next to a format that is not known says all that can be enforced.
        del part["format"]
    elif (pattern := _PATTERNS.get(kind)) is not None:
        del part["format"]
        if "pattern" in part:
            part["allOf"] = [*part.get("allOf", ()), {"pattern": pattern}]
        else:
            part["pattern"] = pattern


def _rewrite_bounds(part: dict[str, Any], *, is_merged: bool) -> None:
    for names, sign in ((_LOWER, -1), (_UPPER, 1)):
        for name in names:
            bound = part.get(name)
            if isinstance(bound, bool) or not isinstance(bound, int) or abs(bound) <= _MAXIMUM:
                continue
            # Drawn in to 2^53 such a bound still admits all exact numbers; a minimum above would
            # admit none.
            if bound * sign < 0:
                raise ValueError(
                    f"{name} is {bound}, which is beyond 2^53; bounds as far out are not supported"
                )
            part[name] = sign * _MAXIMUM
    if part.get("type") == "integer":
        return  # llguidance handles exclusive bounds of integers correctly
    lower, upper = (_bound(part, names) for names in (_LOWER, _UPPER))
    is_pair = lower is not None and upper is not None
    if (
        lower is not None
        and upper is not None
        and (math.trunc(lower) != math.trunc(upper) or lower >= upper)
    ):
        return
    if not (is_pair or is_merged):
        return
    # llguidance 1.9.1 treats an exclusive bound as inclusive if it is an integer that equals the
    # integer part of the other bound.
    for name, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        if _is_number(part.get(name)) and part[name] == math.trunc(part[name]):
            bound = part.pop(name)
            inner = bound + sign * _STEP
            if (
                inner == bound
                or (lower is not None and inner <= lower)
                or (upper is not None and inner >= upper)
            ):
                raise ValueError(f"{name} is {bound}, which is too near the other bound")
            part["minimum" if sign > 0 else "maximum"] = inner


def _bound(part: dict[str, Any], names: tuple[str, str]) -> float | None:
    """Returns the tighter of an inclusive and an exclusive bound, or None if there is neither."""
    bounds: list[float] = [part[name] for name in names if _is_number(part.get(name))]
    if not bounds:
        return None
    return max(bounds) if names is _LOWER else min(bounds)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
