"""Holds the tools that an answer may call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpage.chat_forms.literals import as_json, read_literal
from jaxpage.chat_forms.pieces import AnswerPiece
from jaxpage.chat_forms.text_buffer import MismatchError

_QUALIFIED = re.compile(r"(?:functions?\.)?(.+?)(?::\d+)?")


@dataclass(frozen=True)
class Tools:
    """Holds the tools that may be called, with the schemas of their arguments.

    Attributes:
        schemas: The schemas by name; None if any name is that of a tool.
    """

    schemas: Mapping[str, Any] | None = None

    def resolve(self, name: Any) -> str:
        """Returns the name of a tool, which models write as `functions.NAME` or with a number, too.

        Raises:
            MismatchError: No tool has this name.
        """
        if not isinstance(name, str) or not name:
            raise MismatchError
        if self.schemas is None or name in self.schemas:
            return name
        qualified = _QUALIFIED.fullmatch(name)
        if qualified is None or qualified[1] not in self.schemas:
            raise MismatchError
        return qualified[1]

    def schema(self, name: str) -> Any:
        """Returns the schema of the arguments of a tool, or None."""
        return None if self.schemas is None else self.schemas.get(self.resolve(name))

    def call(self, name: Any, arguments: Any) -> AnswerPiece:
        """Returns the call that a name and arguments are.

        Args:
            name: The name of the tool.
            arguments: An object, its text, or None for no arguments.

        Raises:
            MismatchError: No tool has this name, or the arguments are no object.
        """
        name = self.resolve(name)
        if isinstance(arguments, str):
            arguments = read_literal(arguments) if arguments.strip() else None
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise MismatchError
        return AnswerPiece("call", as_json(arguments), name)
