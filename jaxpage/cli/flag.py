"""A flag of the command line, and the kinds of values that flags take."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpage.settings.byte_sizes import parse_bytes


class OneModel(argparse.Action):
    """The model's name, by position or as a flag, and not twice."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if "model" in namespace:
            raise argparse.ArgumentError(
                None, f"the model is given twice: {namespace.model!r} and {values!r}"
            )
        namespace.model = values


@dataclass(frozen=True)
class Flag:
    """A flag and the setting it gives. What was not given on the command line does not appear in the parsed result."""

    setting: str
    kind: Callable[[str], Any] | None  # None: a switch with --no- form
    help: str
    metavar: str | None = None
    alias: str | None = None  # another name, where vLLM has one
    several: bool = False  # takes one or more values, and may be repeated
    # what argparse does with it, where it is nothing usual
    action: type[argparse.Action] | None = None

    @property
    def option(self) -> str:
        return "--" + self.setting.replace("_", "-")

    def add_to(self, parser: argparse._ArgumentGroup) -> None:
        options = (self.option, self.alias) if self.alias else (self.option,)
        rest: dict[str, Any] = {
            "dest": self.setting,
            "default": argparse.SUPPRESS,
            "help": self.help,
        }
        if self.kind is None:
            parser.add_argument(*options, action=argparse.BooleanOptionalAction, **rest)
        else:
            metavar = self.metavar or {int: "N", float: "X"}.get(self.kind, "NAME")  # type: ignore[call-overload]
            if self.several:
                rest |= {"nargs": "+", "action": "extend"}
            if self.action:
                rest["action"] = self.action
            parser.add_argument(*options, type=self.kind, metavar=metavar, **rest)


def json_object(text: str) -> dict[str, Any]:
    """The value of a flag that takes a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text[:80]!r}")
    return value


def byte_size(text: str) -> int:
    """The value of a flag that takes an amount of memory."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds_or_none(text: str) -> float | None:
    """The value of a flag that takes a number of seconds, or "none" for no limit."""
    return None if text == "none" else float(text)
