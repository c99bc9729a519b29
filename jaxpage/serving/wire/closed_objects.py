"""Closes the objects in the schema of a tool's arguments, as OpenAI's strict mode does.

JSON schema lets an object have any further keys unless the schema says otherwise. A small model
goes on to write such keys until the length limit cuts its call off. So in calls that a grammar
enforces, an object has the keys that its schema names, unless `additionalProperties` or
`unevaluatedProperties` say which others it may have:

    {"properties": {"a": A}}                    {..., "additionalProperties": false}
    {"anyOf": [{"properties": {"a": A}}, ...]}  each member of the union is closed by itself
    {"allOf": [{"properties": {"a": A}},        {..., "properties": {"a": true, "b": true},
               {"properties": {"b": B}}]}             "additionalProperties": false}

A schema that names no key at all, such as {"type": "object"}, stays open within the arguments: the
object would always be empty. As the schema of all arguments it means that there are none.
"""

from __future__ import annotations

from typing import Any

from jaxpage.serving.wire.schemas import NAMED_SCHEMAS, dict_of, list_of, target_of

_OPENING = frozenset(("additionalProperties", "unevaluatedProperties"))
_UNIONS = ("anyOf", "oneOf")
_IN_PLACE = frozenset(("allOf", "$ref", *_UNIONS))
_NAMING = frozenset(
    (
        *("properties", "patternProperties", "required", "propertyNames", "minProperties"),
        *("const", "enum"),
    )
)
_DEFINITIONS = ("$defs", "definitions")
# Keywords with schemas of other values than the object itself.
_OF_VALUES = (
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
    *_DEFINITIONS,
)
# Definitions are copied into the schemas that are merged with them; more copies than this make a
# schema too large, and it stays as it is.
_MAX_COPIES = 256


class _StaysOpenError(Exception):
    """The keys of an object are not known, or the schema says itself which it may have."""


class _CannotCloseError(Exception):
    """A schema refers to itself where it is merged, or has too many such references."""


def close_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of the schema of a tool's arguments whose objects are closed."""
    if schema.get("type") == "object" and schema.keys().isdisjoint(_NAMING | _OPENING | _IN_PLACE):
        return {**schema, "additionalProperties": False}
    try:
        closed: dict[str, Any] = _Closing(schema).close(schema)
    except _CannotCloseError:
        return schema
    return closed


class _Keys:
    """Collects the keys that schemas of one object name.

    Attributes:
        names: The keys, in their order.
        patterns: The patterns of further keys.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = dict.fromkeys(names)
        self.patterns: dict[str, Any] = {}


class _Closing:
    """Closes the objects of one schema, into which references lead."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._copied: list[str] = []  # the references that are being copied
        self._num_copies = 0

    def close(self, part: Any, outer: tuple[str, ...] = ()) -> Any:
        """Returns a part of the schema in which the object that it describes is closed, too.

        Args:
            part: The part.
            outer: The keys that the schemas around the member of a union name for its object.
        """
        if part is True and outer:
            part = {}
        if not isinstance(part, dict):
            return part
        if not part.keys().isdisjoint(_OPENING):
            return self.open(part)
        applied = part.keys() & _IN_PLACE
        if not outer and len(applied) == 1 and part.keys().isdisjoint(_NAMING):
            if "$ref" in applied:
                # It leads to a schema that is closed where it stands.
                return self._with_closed_values(part)
            if len(members := list_of(part, "allOf")) == 1:
                return {**self._with_closed_values(part), "allOf": [self.close(members[0])]}
        unions = [name for name in _UNIONS if isinstance(part.get(name), list)]
        keys = _Keys(outer)
        try:
            self._collect(part, keys, set(), with_unions=len(unions) > 1)
            if unions and keys.patterns:
                self._collect(part, keys, set(), with_unions=True)
                unions = []
        except _StaysOpenError:
            return self.open(part)
        if len(unions) == 1:
            (union,) = unions
            members = [self.close(member, tuple(keys.names)) for member in part[union]]
            return {**self.open({**part, union: []}), union: members}
        if not keys.names and not keys.patterns and "properties" not in part:
            return self.open(part)
        return _with_keys(self.open(part), keys)

    def open(self, part: Any) -> Any:
        """Returns a part in which everything is closed but the object that it describes.

        Definitions that are merged with it are copied, because they are closed where they stand.
        """
        if not isinstance(part, dict):
            return part
        result = self._with_closed_values(part)
        for name in ("allOf", *_UNIONS):
            if isinstance(members := part.get(name), list):
                result[name] = [self.open(member) for member in members]
        if isinstance(reference := part.get("$ref"), str):
            target = target_of(self._root, reference)
            if isinstance(target, dict):
                del result["$ref"]
                result["allOf"] = [*result.get("allOf", ()), self._copy(reference, target)]
        return result

    def _copy(self, reference: str, target: dict[str, Any]) -> Any:
        self._num_copies += 1
        if reference in self._copied or self._num_copies > _MAX_COPIES:
            raise _CannotCloseError
        self._copied.append(reference)
        copy = self.open({name: target[name] for name in target if name not in _DEFINITIONS})
        self._copied.pop()
        return copy

    def _with_closed_values(self, part: dict[str, Any]) -> dict[str, Any]:
        if part is not self._root and isinstance(part.get("$id"), str):
            # References in it lead elsewhere than those of the whole schema.
            raise _CannotCloseError
        result = dict(part)
        for name in _OF_VALUES:
            held = part.get(name)
            if isinstance(held, list):
                result[name] = [self.close(inner) for inner in held]
            elif isinstance(held, dict) and name in NAMED_SCHEMAS:
                result[name] = {key: self.close(inner) for key, inner in held.items()}
            elif isinstance(held, dict):
                result[name] = self.close(held)
        return result

    def _collect(self, part: Any, keys: _Keys, seen: set[int], *, with_unions: bool) -> None:
        """Adds the keys that a part names for its object, and those of what is merged with it.

        Raises:
            _StaysOpenError: The schema opens the object, or refers to something unknown.
        """
        if not isinstance(part, dict) or id(part) in seen:
            return
        seen.add(id(part))
        if part.get("additionalProperties", False) is not False or "unevaluatedProperties" in part:
            raise _StaysOpenError
        required = [key for key in list_of(part, "required") if isinstance(key, str)]
        keys.names.update(dict.fromkeys([*dict_of(part, "properties"), *required]))
        keys.patterns.update(dict_of(part, "patternProperties"))
        merged = list_of(part, "allOf")
        if with_unions:
            merged = [*merged, *list_of(part, "anyOf"), *list_of(part, "oneOf")]
        if "$ref" in part:
            target = target_of(self._root, part["$ref"])
            if not isinstance(target, dict):
                raise _StaysOpenError
            merged.append(target)
        for member in merged:
            self._collect(member, keys, seen, with_unions=True)


def _with_keys(part: dict[str, Any], keys: _Keys) -> dict[str, Any]:
    """Returns a part that admits these keys and no others."""
    properties = dict_of(part, "properties")
    closed = {
        **part,
        "properties": {
            **properties,
            **{name: True for name in keys.names if name not in properties},
        },
    }
    if keys.patterns:
        patterns = {pattern: True for pattern in keys.patterns}
        closed["patternProperties"] = {**patterns, **dict_of(part, "patternProperties")}
    return {**closed, "additionalProperties": False}
