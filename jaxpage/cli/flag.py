"""Declares the form of a flag of the command line, and parses the values that flags take."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpage.settings.byte_sizes import parse_bytes


class OneModel(argparse.Action):
    """Stores the model's name, given by position or as a flag, and refuses a second one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Stores the name, or raises ArgumentError if there is one already."""
        if "model" in namespace:
            raise argparse.ArgumentError(
                None, f"the model is given twice: {namespace.model!r} and {values!r}"
            )
        namespace.model = values


@dataclass(frozen=True)
class Flag:
    """A flag and its setting; one that is not given does not appear in the parsed result.

    Attributes:
        setting: The name of the setting.
        kind: Parses the value; None for a switch, which has a --no- form.
        help: The text of --help.
        metavar: The name of the value in --help; None for that of its kind.
        alias: Another name of the flag, such as that of vLLM.
        several: The flag takes one or more values, and may be repeated.
        action: The action of argparse, if it is not the usual one.
    """

    setting: str
    kind: Callable[[str], Any] | None
    help: str
    metavar: str | None = None
    alias: str | None = None
    several: bool = False
    action: type[argparse.Action] | str | None = None

    @property
    def option(self) -> str:
        """Returns the flag as it is written, such as --max-tokens."""
        return "--" + self.setting.replace("_", "-")

    def add_to(self, parser: argparse._ArgumentGroup) -> None:
        """Adds the flag to a group of a parser."""
        options = (self.option, self.alias) if self.alias else (self.option,)
        keywords: dict[str, Any] = {
            "dest": self.setting,
            # What is not given must not look as if it were: a file may say it.
            "default": argparse.SUPPRESS,
            "help": self.help,
        }
        if self.kind is None:
            parser.add_argument(*options, action=argparse.BooleanOptionalAction, **keywords)
        else:
            metavar = self.metavar or {int: "N", float: "X"}.get(self.kind, "NAME")  # type: ignore[call-overload]
            if self.several:
                keywords |= {"nargs": "+", "action": "extend"}
            if self.action:
                keywords["action"] = self.action
            parser.add_argument(*options, type=self.kind, metavar=metavar, **keywords)


def json_object(text: str) -> dict[str, Any]:
    """Returns the value of a flag that takes a JSON object."""
    try:
        value = json.loads(text)
    # None is no object either, so that both mistakes have one message.
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text[:80]!r}")
    return value


def json_object_or_auto(text: str) -> dict[str, Any] | str:
    """Returns the value of a flag that takes a JSON object, or the word auto."""
    if text == "auto":
        return text
    try:
        return json_object(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"not a JSON object, nor auto: {text[:80]!r}") from None


def int_or_auto(text: str) -> int | str:
    """Returns the value of a flag that takes an integer, or the word auto."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not an integer, nor auto: {text[:80]!r}") from None


def byte_size(text: str) -> int:
    """Returns the value of a flag that takes an amount of memory, in bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds_or_none(text: str) -> float | None:
    """Returns the value of a flag that takes a number of seconds, or "none" for no limit."""
    return None if text == "none" else float(text)
