"""Rewrites JSON schemas into what llguidance enforces to the letter, or refuses them by the keyword that it would not.

A rewritten schema admits nothing that the given one does not. It may admit less where numbers are concerned: llguidance
calculates with floats, which are exact up to 2^53.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

_MOST = 2**53 - 1  # the integers of which each has a float of its own
_STEP = 1e-9  # from a bound that a number may not have to the first that it may
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MERGED = ("allOf", "anyOf", "oneOf", "$ref")
_SINGLE = (
    *("items", "additionalProperties", "additionalItems", "not", "contains", "if", "then", "else"),
    *("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)
# Formats that restrict nothing, or nothing that the text shows: they tell a program what to make of
# it.
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
_PATTERNS = {  # of formats that llguidance does not have; pydantic writes them
    **{f"uuid{version}": f"^{_UUID % version}$" for version in (1, 3, 4, 5, 6, 7, 8)},
    "base64": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "base64url": "^([A-Za-z0-9_-]{4})*([A-Za-z0-9_-]{2}(==)?|[A-Za-z0-9_-]{3}=?)?$",
}


def enforceable(schema: str) -> str:
    """Returns the schema as llguidance shall read it. Raises ValueError with the keyword that it could not enforce."""
    try:
        return json.dumps(_rewritten(json.loads(schema)))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def overlapping(schema: str) -> Iterator[tuple[str, str]]:
    """Yields properties with the patterns of `patternProperties` that stand beside them.

    A name that both cover would have to satisfy two schemas, and llguidance gives up on it while it generates.
    """
    for part in _parts(json.loads(schema)):
        names, patterns = part.get("properties"), part.get("patternProperties")
        if isinstance(names, dict) and isinstance(patterns, dict):
            yield from ((name, pattern) for name in names for pattern in patterns)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(schema, dict):
        return
    yield schema
    for name in _NAMED:
        if isinstance(held := schema.get(name), dict):
            for one in held.values():
                yield from _parts(one)
    for name in {*_LISTED, *_SINGLE}:
        held = schema.get(name)
        for one in held if isinstance(held, list) else [held]:
            yield from _parts(one)


def _rewritten(schema: Any, *, is_merged: bool = False) -> Any:
    """is_merged: bounds that stand elsewhere may come to those of the schema."""
    if not isinstance(schema, dict):
        return schema
    part = dict(schema)
    for name in _NAMED:
        if isinstance(held := part.get(name), dict):
            is_definition = name in ("$defs", "definitions")
            part[name] = {
                key: _rewritten(one, is_merged=is_definition) for key, one in held.items()
            }
    for name in {*_LISTED, *_SINGLE} & part.keys():
        held, merges = part[name], name in _MERGED
        part[name] = (
            [_rewritten(one, is_merged=merges) for one in held]
            if isinstance(held, list)
            else _rewritten(held)
        )
    _check_values(part)
    _rewrite_counts(part)
    _rewrite_format(part)
    _rewrite_bounds(part, is_merged=is_merged or not part.keys().isdisjoint(_MERGED))
    return part


def _check_values(part: dict[str, Any]) -> None:
    for name in ("const", "enum", "multipleOf"):
        if name in part and (number := _inexact(part[name])) is not None:
            raise ValueError(
                f"{name} has {number}, which is beyond 2^53 and no float; integers as large are not supported"
            )


def _inexact(value: Any) -> int | None:
    """The first integer in a value that llguidance would round, if there is one."""
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return next((found for one in inside if (found := _inexact(one)) is not None), None)
    if (
        isinstance(value, int)
        and abs(value) > _MOST
        and (abs(value) > 10**300 or int(float(value)) != value)
    ):
        return value
    return None


def _rewrite_counts(part: dict[str, Any]) -> None:
    if part.get("uniqueItems") is False:
        del part["uniqueItems"]
    if "contains" not in part:
        part.pop("minContains", None)  # without `contains` they say nothing
        part.pop("maxContains", None)
    elif part.get("minContains") == 0 and "maxContains" not in part:
        del part["contains"], part["minContains"]


def _rewrite_format(part: dict[str, Any]) -> None:
    kind = part.get("format")
    if not isinstance(kind, str):
        return
    if kind in _LABELS:
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
            if isinstance(bound, bool) or not isinstance(bound, int) or abs(bound) <= _MOST:
                continue
            if bound * sign < 0:
                raise ValueError(
                    f"{name} is {bound}, which is beyond 2^53; bounds as far out are not supported"
                )
            part[name] = sign * _MOST
    if part.get("type") == "integer":
        return  # of an exclusive bound the next integer is meant, which llguidance gets right
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
    # llguidance 1.9.1 takes an exclusive bound for an inclusive one if it is an integer and the
    # other one has its integer part.
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
    """The tighter of an inclusive and an exclusive bound."""
    given: list[float] = [part[name] for name in names if _is_number(part.get(name))]
    if not given:
        return None
    return max(given) if names is _LOWER else min(given)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
