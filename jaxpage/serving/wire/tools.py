"""Holds the schemas of the arguments that a grammar makes the model write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jaxpage.chat_forms import AnswerPiece, ReasoningPlaces


class NamedCall:
    """Reads an answer that is nothing but the arguments of one call.

    The grammar of a tool that the request names makes the model write it, where the model has no
    form of its own.
    """

    def __init__(self, name: str) -> None:
        self.reasoning = ReasoningPlaces(is_over=True)
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> Iterator[AnswerPiece]:
        """Yields the pieces that are certain with this text."""
        if text:
            yield (
                AnswerPiece("arguments", text)
                if self._has_begun
                else AnswerPiece("call", text, self._name)
            )
            self._has_begun = True

    def finish(self) -> Iterator[AnswerPiece]:
        """Yields the remaining pieces."""
        return iter(())


def make_named_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of the arguments of one tool.

    This is the tool's own schema if its type is "object"; otherwise an object is demanded as well.
    """
    if schema.get("type") == "object":
        return schema
    return {"type": "object", "$ref": "#/$defs/tool0", "$defs": _definitions([schema])}


def _definitions(schemas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the schemas of tools, each with an "$id", so that its references lead into itself.

    Older drafts ignore an "$id" next to a "$ref", so "$schema" is removed; the compiler of grammars
    uses it for nothing else.
    """
    return {
        f"tool{index}": {
            **{name: value for name, value in schema.items() if name != "$schema"},
            "$id": f"https://jaxpage.invalid/tool{index}/",
        }
        for index, schema in enumerate(schemas)
    }
