"""Reads a request body as a JSON object, strictly.

A body that JSON does not allow is refused, and so is one whose meaning JSON leaves open, such as an
object that has a key twice.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from jaxpage.serving.wire.errors import ApiError, quotes
from jaxpage.settings.argument_checks import shown

MAX_BODY_DEPTH = 128
# Both limits keep memory small: a parsed value can be fifty times as large as its text.
MAX_CONTAINERS = 65_536
MAX_STRINGS = 262_144
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@quotes
def parse_object(raw: bytes) -> dict[str, Any]:
    """Returns the JSON object of a request body; the time is linear in the length of the body.

    Raises:
        ApiError: The status is 400: the body is empty, not UTF-8, not JSON or no object; it is too
            deep or has too many arrays, objects or strings; it has a key twice, a number that is
            not finite, an integer with too many digits, or text that is not valid Unicode.
    """
    if not raw.strip():
        raise ApiError(400, "Request body is empty; expected a JSON object")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"Request body is not UTF-8: byte {error.start} is not valid") from None
    _check_structure(text)
    try:
        # Integers have no hook: a million calls of it would keep the engine's thread waiting.
        value = json.loads(
            text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_without_twins
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ApiError(400, f"Request body is not valid JSON: {error.msg} ({where})") from None
    except RecursionError:
        raise ApiError(400, f"Request body is nested more than {MAX_BODY_DEPTH} deep") from None
    # Python reads no integer that has more digits than sys.get_int_max_str_digits().
    except ValueError:
        raise ApiError(400, "Request body has an integer with too many digits to read") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"Request body is {shown(value)}; expected a JSON object")
    if _SURROGATE.search(text):
        for name, item in value.items():
            _check_unicode(name, item)
    return value


def _check_structure(text: str) -> None:
    """Raises ApiError for a text that is nested too deeply or has too many parts.

    This runs before the parser, which recurses and makes an object of each part. A string that does
    not end is left for the parser to report.
    """
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
    """Returns a string field of a request to an administrator's route.

    Raises:
        ApiError: The field is not a string of 1 to 4096 characters.
    """
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 4096:
        raise ApiError(
            400, f"{name} must be a string of 1 to 4096 characters, got {shown(value)}", param=name
        )
    return value


def check_fields(body: dict[str, Any], known: set[str]) -> None:
    """Raises ApiError if an administrator's request has a field that is not a known one."""
    if unknown := sorted(body.keys() - known):
        raise ApiError(400, f"Unknown parameter: {shown(unknown[0])}", param="body")
