"""Checks one argument at a time: its type and its range; raises `ValueError` if it is wrong.

The checks are calls and no asserts, so that they also hold under `python -O`. Every message names
the parameter and its value. A bool is no integer here, and a checked value is hashable.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, NoReturn, ParamSpec, TypeVar

from jaxpage.settings.from_vllm import answer_for_keyword, without_neutral

Item = TypeVar("Item")
_P = ParamSpec("_P")

INT32_MAX = 2**31 - 1
_SHOWN_CHARACTERS = 80
# It reads the beginning of a value only, so that a huge value costs no time.
_LONG_ENOUGH = reprlib.Repr()
for _kind in ("string", "other", "long"):
    setattr(_LONG_ENOUGH, f"max{_kind}", 4 * _SHOWN_CHARACTERS)
for _kind in ("list", "tuple", "dict", "set", "frozenset"):
    setattr(_LONG_ENOUGH, f"max{_kind}", _SHOWN_CHARACTERS)
# Comparing takes time: no names are suggested for a name longer than this.
MAX_NAME_CHARACTERS = 128


def show(value: object) -> str:
    """Returns `repr(value)`, cut so that it fits into a message whatever the value is."""
    try:
        text = _LONG_ENOUGH.repr(value)
    except (
        ValueError,
        RecursionError,
    ):  # an integer above Python's digit limit, or nesting deeper than the stack
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def count(number: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 request" or "2 requests"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def close_names(
    name: str, names: Iterable[str], maximum: int = 1, cutoff: float = 0.6
) -> list[str]:
    """Returns the known names that were probably meant, most similar first.

    Args:
        name: The name that is not known. One that is too long to be a name gets no suggestion.
        names: The known names.
        maximum: How many to return at most.
        cutoff: How similar a name must be, 0 to 1.
    """
    return (
        difflib.get_close_matches(name, list(names), maximum, cutoff)
        if len(name) <= MAX_NAME_CHARACTERS
        else []
    )


def names_checked(init: Callable[_P, None]) -> Callable[_P, None]:
    """Returns an `__init__` whose TypeError for an unknown keyword suggests a name.

    Keywords of vLLM's `SamplingParams` that ask for nothing, such as `detokenize=True`, are left
    out, and others have an answer.
    """
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def call_checked(*arguments: _P.args, **values: _P.kwargs) -> None:
        keywords: Any = without_neutral("sampling", dict.fromkeys(known), values)
        for unknown in keywords.keys() - known:
            answer = answer_for_keyword("sampling", unknown)
            if answer is not None and answer.kind != "same":
                kind = type(arguments[0]).__name__
                raise TypeError(f"{kind} has no parameter {unknown!r}; {answer.text}")
            close = close_names(unknown, known)
            hint = f"did you mean {close[0]!r}?" if close else f"parameters are {', '.join(known)}"
            raise TypeError(f"{type(arguments[0]).__name__} has no parameter {unknown!r}; {hint}")
        init(*arguments, **keywords)

    return call_checked


def refuse(name: str, value: object, expected: str) -> NoReturn:
    """Raises the `ValueError` that names the parameter, what it must be and what it was."""
    raise ValueError(f"{name} must be {expected}, got {show(value)}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ValueError if a value is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def check_bool(name: str, value: Any) -> bool:
    """Returns the value if it is a bool, and raises ValueError otherwise."""
    if not isinstance(value, bool):
        refuse(name, value, "True or False")
    return value


def check_int(name: str, value: Any, low: int, high: int = INT32_MAX) -> int:
    """Returns an integer of any kind, numpy's too, that is in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        refuse(name, value, f"an integer from {low} to {high}")
    return int(value)


def check_float(
    name: str, value: Any, low: float, high: float, *, above_low: bool = False
) -> float:
    """Returns a finite number that is in [low, high], or in (low, high] with `above_low`."""
    expected = "a finite number"
    expected += f" {'above' if above_low else 'from'} {low:g}" if low > -math.inf else ""
    expected += f" to {high:g}" if high < math.inf else ""
    if isinstance(value, bool) or not isinstance(value, Real):
        refuse(name, value, expected)
    try:
        # An integer of Python may be larger than any float.
        number = float(value)
    except OverflowError:
        refuse(name, value, expected)
    if not math.isfinite(number) or not low <= number <= high or (above_low and number == low):
        refuse(name, value, expected)
    return number


def check_text(name: str, value: Any, max_characters: int | None = None) -> str:
    """Returns a string that is not empty, is valid UTF-8 and has at most `max_characters`."""
    if not isinstance(value, str) or not value:
        refuse(name, value, "a string that is not empty")
    if max_characters is not None and len(value) > max_characters:
        refuse(name, value, f"a string of at most {max_characters} characters")
    if any("\ud800" <= character <= "\udfff" for character in value):
        refuse(name, value, "valid Unicode (it contains a lone surrogate)")
    return value


def check_items(
    name: str, value: Any, check: Callable[[str, Any], Item], max_items: int | None = None
) -> tuple[Item, ...]:
    """Returns the items of a list as a tuple, each of them checked.

    Any collection with a length is a list here, but text, bytes and a mapping are not.
    """
    if not isinstance(value, Collection) or isinstance(value, str | bytes | bytearray | Mapping):
        refuse(name, value, "a list")
    if max_items is not None and len(value) > max_items:
        refuse(name, value, f"a list of at most {max_items} items ({len(value)} are given)")
    return tuple(check(f"{name}[{index}]", item) for index, item in enumerate(value))


def check_token_id(name: str, value: Any) -> int:
    """Returns a token id, which is never negative and is an int32 on the device.

    The engine, which knows the size of the vocabulary, checks the upper bound.
    """
    return check_int(name, value, 0)
