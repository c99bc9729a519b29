"""A request body as a JSON object, strictly: what JSON does not have, or leaves open, is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from jaxpage.serving.wire.errors import ApiError, quotes
from jaxpage.settings.argument_checks import shown

MAX_BODY_DEPTH = 128
# Of a body: a parser makes objects of them that are up to fifty times as large as their text.
MAX_CONTAINERS = 65_536
MAX_STRINGS = 262_144
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@quotes
def parse_object(raw: bytes) -> dict[str, Any]:
    """The object. Linear in its length.

    Raises:
        ApiError: 400; it is empty, not UTF-8, not JSON, no object, too deep, has a key twice, a number that is none, or text that is
            no Unicode.
    """
    if not raw.strip():
        raise ApiError(400, "Request body is empty; expected a JSON object")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"Request body is not UTF-8: byte {error.start} is not valid") from None
    _check_structure(text)
    try:
        value = json.loads(
            text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_without_twins
        )  # no hook for integers: of a million of them it would take the engine's thread its turns
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ApiError(400, f"Request body is not valid JSON: {error.msg} ({where})") from None
    except RecursionError:
        raise ApiError(400, f"Request body is nested more than {MAX_BODY_DEPTH} deep") from None
    except ValueError:  # Python reads no integer of more digits than sys.get_int_max_str_digits()
        raise ApiError(400, "Request body has an integer with too many digits to read") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"Request body is {shown(value)}; expected a JSON object")
    if _SURROGATE.search(text):
        for name, item in value.items():
            _check_unicode(name, item)
    return value


def _check_structure(text: str) -> None:
    """Before the parser, which recurses and makes objects. A string that does not end is the parser's to find."""
    if text.count("[") + text.count("{") <= MAX_BODY_DEPTH and text.count('"') <= 2 * MAX_STRINGS:
        return
    depth = num_containers = num_strings = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        if found[0] in "[{":
            depth += 1
            num_containers += 1
            if depth > MAX_BODY_DEPTH:
                raise ApiError(400, f"Request body is nested more than {MAX_BODY_DEPTH} deep")
            if num_containers > MAX_CONTAINERS:
                raise ApiError(
                    400, f"Request body has more than {MAX_CONTAINERS} arrays and objects"
                )
        elif found[0] in "]}":
            depth -= 1
        else:
            num_strings += 1
            if num_strings > MAX_STRINGS:
                raise ApiError(400, f"Request body has more than {MAX_STRINGS} strings")


def _no_number(constant: str) -> NoReturn:
    raise ApiError(400, f"{constant} is not a valid JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _no_number(shown(digits))


def _without_twins(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ApiError(400, f"Request body has the key {shown(name)} twice")
        found[name] = value
    return found


def _check_unicode(name: str, value: Any) -> None:
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        name = name.encode(errors="replace").decode()
        raise ApiError(
            400, f"{shown(name)} contains invalid Unicode: a lone surrogate", param=name
        ) from None


def text_field(body: dict[str, Any], name: str) -> str:
    """Of a request for whoever runs the server. Raises ApiError."""
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 4096:
        raise ApiError(
            400, f"{name} must be a string of 1 to 4096 characters, got {shown(value)}", param=name
        )
    return value


def check_fields(body: dict[str, Any], known: set[str]) -> None:
    """The same: unknown ones are refused."""
    if unknown := sorted(body.keys() - known):
        raise ApiError(400, f"Unknown parameter: {shown(unknown[0])}", param="body")
