"""Checks the values of `SamplingParams.structured_outputs` as far as possible without a model.

The field is vLLM's, and takes one kind of value at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxpage.settings.argument_checks import check_items, check_text, refuse

STRUCTURED_OUTPUT_KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_CHARACTERS = 65536  # the longest value, written as JSON


def check_structured_outputs(value: Any) -> tuple[str, str] | None:
    """Returns the kind and the value as JSON, or None if nothing is given.

    A schema or grammar that cannot be compiled is refused later, when the request is admitted.

    Raises:
        ValueError: The value is no mapping with exactly one kind, or the kind does not take it.
    """
    if value is None:
        return None
    if (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(part, str) for part in value)
    ):
        # The value is already in the stored form: dataclasses.replace and event logs pass that.
        value = {value[0]: _parse(value[0], value[1])}
    kinds = (
        {name: item for name, item in value.items() if item is not None}
        if isinstance(value, Mapping)
        else {}
    )
    if len(kinds) != 1 or not set(kinds) <= set(STRUCTURED_OUTPUT_KINDS):
        refuse(
            "structured_outputs",
            value,
            f"a mapping with exactly one of {', '.join(STRUCTURED_OUTPUT_KINDS)}",
        )
    ((kind, item),) = kinds.items()
    name = f"structured_outputs[{kind!r}]"
    try:
        text = json.dumps(_check(name, kind, item), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        # It is a refusal of `_check`, which has named the parameter already.
        if isinstance(error, ValueError) and name in str(error):
            raise
        refuse(name, item, "something that JSON can express")
    if len(text) > MAX_CHARACTERS:
        refuse(name, item, f"at most {MAX_CHARACTERS} characters as JSON ({len(text)} are given)")
    return kind, text


def _check(name: str, kind: str, item: Any) -> Any:
    if kind == "json":
        schema = _parse(name, item) if isinstance(item, str) else item
        return (
            schema
            if isinstance(schema, dict)
            else refuse(name, item, "a JSON schema: an object, or its text")
        )
    if kind == "choice":
        return check_items(name, item, check_text) or refuse(name, item, "a list that is not empty")
    if kind == "json_object":
        return True if item is True else refuse(name, item, "True")
    return check_text(name, item)


def _parse(name: str, text: str) -> Any:
    def no_number(constant: str) -> NoReturn:
        raise ValueError(constant)

    try:
        # Python would read NaN and Infinity, which are no JSON.
        return json.loads(text, parse_constant=no_number)
    except (ValueError, RecursionError):
        refuse(name, text, "valid JSON")
