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
from jaxpage.settings.argument_checks import show

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
    value = JsonReader().read(text)
    if not isinstance(value, dict):
        raise ApiError(400, f"Request body is {show(value)}; expected a JSON object")
    if _SURROGATE.search(text):
        for name, item in value.items():
            _check_unicode(name, item)
    return value


class JsonReader:
    """Reads the JSON of one request: its body, or texts in it that are JSON themselves.

    All texts that one reader reads share the limits of a body.
    """

    def __init__(self) -> None:
        self._num_containers = 0
        self._num_strings = 0

    def read(self, text: str, param: str | None = None) -> Any:
        """Returns the value of a JSON text.

        Args:
            text: The text.
            param: The path of the field that the text is in; None for a body.

        Raises:
            ApiError: The text is refused; see `parse_object`.
        """
        text_name = _TextName(param)
        self._check_structure(text, text_name)
        try:
            # Integers have no hook: a million calls of it would keep the engine's thread waiting.
            value = json.loads(
                text,
                parse_constant=text_name.refuse_number,
                parse_float=text_name.finite,
                object_pairs_hook=text_name.without_twins,
            )
        except json.JSONDecodeError as error:
            where = f"line {error.lineno}, column {error.colno}"
            raise text_name.refusal(f"is not valid JSON: {error.msg} ({where})") from None
        except RecursionError:
            raise text_name.refusal(f"is nested more than {MAX_BODY_DEPTH} deep") from None
        # Python reads no integer that has more digits than sys.get_int_max_str_digits().
        except ValueError:
            raise text_name.refusal("has an integer with too many digits to read") from None
        return value

    def _check_structure(self, text: str, text_name: _TextName) -> None:
        """Raises ApiError for a text that is nested too deeply or has too many parts.

        This runs before the parser, which recurses and makes an object of each part. A string that
        does not end is left for the parser to report.
        """
        num_brackets = text.count("[") + text.count("{")
        num_quotes = text.count('"')
        if (
            num_brackets <= MAX_BODY_DEPTH
            and self._num_containers + num_brackets <= MAX_CONTAINERS
            and self._num_strings + num_quotes // 2 < MAX_STRINGS
        ):
            self._num_containers += num_brackets
            self._num_strings += num_quotes // 2
            return
        depth = 0
        for match in _STRING_OR_BRACKET.finditer(text):
            if match[0] in "[{":
                depth += 1
                self._num_containers += 1
                if depth > MAX_BODY_DEPTH:
                    raise text_name.refusal(f"is nested more than {MAX_BODY_DEPTH} deep")
                if self._num_containers > MAX_CONTAINERS:
                    raise text_name.refusal(
                        f"has more than {MAX_CONTAINERS} arrays and objects", is_shared=True
                    )
            elif match[0] in "]}":
                depth -= 1
            else:
                self._num_strings += 1
                if self._num_strings > MAX_STRINGS:
                    raise text_name.refusal(f"has more than {MAX_STRINGS} strings", is_shared=True)


class _TextName:
    """Makes the errors of one JSON text, which name the field that it is in."""

    def __init__(self, param: str | None) -> None:
        self._param = param
        self._text_name = f"{param}, the text of a JSON object," if param else "Request body"

    def refusal(self, problem: str, *, is_shared: bool = False) -> ApiError:
        """Returns the error.

        Args:
            problem: The words after the name of the text.
            is_shared: True if the limit holds for all texts of its kind together.
        """
        others = " with the texts before it," if is_shared and self._param else ""
        return ApiError(400, f"{self._text_name}{others} {problem}", param=self._param)

    def refuse_number(self, constant: str) -> NoReturn:
        """Raises the error for a number that JSON does not have."""
        if self._param:
            raise self.refusal(f"has {constant}, which is not a valid JSON number")
        raise ApiError(400, f"{constant} is not a valid JSON number")

    def finite(self, digits: str) -> float:
        """Returns a number that is not too large for a float."""
        number = float(digits)
        return number if math.isfinite(number) else self.refuse_number(show(digits))

    def without_twins(self, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Returns the object of these pairs, in which no key is twice."""
        members: dict[str, Any] = {}
        for name, value in pairs:
            if name in members:
                raise self.refusal(f"has the key {show(name)} twice")
            members[name] = value
        return members


def _check_unicode(name: str, value: Any) -> None:
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        name = name.encode(errors="replace").decode()
        raise ApiError(
            400, f"{show(name)} contains invalid Unicode: a lone surrogate", param=name
        ) from None


def text_field(body: dict[str, Any], name: str) -> str:
    """Returns a string field of a request to an administrator's route.

    Raises:
        ApiError: The field is not a string of 1 to 4096 characters.
    """
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 4096:
        raise ApiError(
            400, f"{name} must be a string of 1 to 4096 characters, got {show(value)}", param=name
        )
    return value


def check_fields(body: dict[str, Any], known: set[str]) -> None:
    """Raises ApiError if an administrator's request has a field that is not a known one."""
    if unknown := sorted(body.keys() - known):
        raise ApiError(400, f"Unknown parameter: {show(unknown[0])}", param="body")
