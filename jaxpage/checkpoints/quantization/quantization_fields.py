"""Reads `quantization_config` of config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from jaxpage.models.config import ConfigFields

T = TypeVar("T")


class QuantizationFields(ConfigFields):
    """Holds the fields of an object of config.json in which null is the same as absent.

    Attributes:
        place: The place of the object in config.json.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        place: str = "quantization_config",
        parent: QuantizationFields | None = None,
    ) -> None:
        super().__init__(config, parent)
        self.place = place

    def refuse(self, name: str, says: str) -> None:
        """Notes that a field's value is not supported.

        Args:
            name: The field.
            says: The text that follows the value in the error.
        """
        self.note_unsupported(self._describe(name, says))

    def refuse_wrong(self, name: str, says: str) -> None:
        """Notes that a field has a value that no checkpoint can have; see `refuse`."""
        self.note_wrong(self._describe(name, says))

    def _describe(self, name: str, says: str) -> str:
        return f"{self.place}.{name} = {self.config.get(name)!r} {says}"

    def first_of(self, *names: str) -> str:
        """Returns the first of several names of one field that has a value.

        It refuses another value under another name.
        """
        present = [name for name in names if self.config.get(name) is not None] or [names[0]]
        first = present[0]
        for name in present[1:]:
            if self.config[name] != self.config[first]:
                self.refuse_wrong(name, f"contradicts {first} = {self.config[first]!r}")
        return first

    def one_of(self, name: str, choices: Sequence[T], default: Any = None) -> T:
        """Returns the value of a field, which must be one of the choices."""
        value = default if self.config.get(name) is None else self.config[name]
        for choice in choices:
            # In Python true equals 1, and 8.0 equals 8.
            if value == choice and isinstance(value, type(choice)):
                return choice
        named = ", ".join(map(repr, choices))
        self.refuse(
            name,
            f"is not one of {named}" if len(choices) > 1 else f"is not supported, only {named}",
        )
        return choices[0]

    def flag(self, name: str, default: bool) -> bool:
        """Returns the value of a field, which must be true or false."""
        value = default if self.config.get(name) is None else self.config[name]
        if not isinstance(value, bool):
            self.refuse_wrong(name, "must be true or false")
            return default
        return value

    def absent(self, *names: str) -> None:
        """Refuses these fields, unless they are null, false or empty."""
        for name in names:
            if self.config.get(name):
                self.refuse(name, "is not supported")

    def names(self, *fields: str) -> tuple[str, ...]:
        """Returns a list of names, from the first of these fields that has one; see `matches`."""
        name = next((name for name in fields if self.config.get(name)), fields[0])
        value = self.config.get(name) or []
        if not isinstance(value, list) or not all(
            isinstance(each, str) and is_pattern(each) for each in value
        ):
            self.refuse_wrong(
                name, "must be a list of names, or of regular expressions after 're:'"
            )
            return ()
        return tuple(value)

    def sizes(self, name: str, count: int) -> list[int] | None:
        """Returns a list of so many sizes; None where there is no such field."""
        value = self.config.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(type(n) is int and n > 0 for n in value)
        ):
            self.refuse_wrong(name, f"must be a list of {count} sizes")
            return None
        return value

    def group_size(self, *fields: str, all_inputs: bool = True) -> int | None:
        """Returns the number of inputs that share a scale, from the first of these fields.

        It is None if all inputs share one. A config that may say so writes -1.
        """
        name = self.first_of(*fields)
        size = self.config.get(name)
        if all_inputs and size == -1:
            return None
        if type(size) is not int or size < 1:
            self.refuse_wrong(name, f"must be a size{' or -1' * all_inputs}")
            return None
        return size

    def part(self, name: str) -> QuantizationFields:
        """Returns the object in a field; an empty one where there is none."""
        value = self.config.get(name) or {}
        if not isinstance(value, dict):
            self.refuse_wrong(name, "must be an object")
            value = {}
        return QuantizationFields(value, f"{self.place}.{name}", self)


def is_pattern(text: str) -> bool:
    """Returns whether it is a name, or a regular expression after "re:" that compiles."""
    try:
        re.compile(text.removeprefix("re:"))
    except re.error:
        return not text.startswith("re:")
    return True
