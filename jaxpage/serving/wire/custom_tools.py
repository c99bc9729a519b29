"""Shows tools whose input is a text as functions, and reads the calls of them.

OpenAI calls such tools custom. Chat templates know functions alone, so a custom tool is a function
with one argument, the text `input`. Where the request names the tool and its input keeps to a
grammar, the answer is nothing but the input:

    tool_choice names it, with a grammar      *** Begin Patch ...
    otherwise, in the model's form of calls   {"name": "apply_patch", "arguments": {"input": "..."}}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from jaxpage.chat_forms import AnswerPiece, PieceParser
from jaxpage.serving.wire.tool_fields import (
    AnyTool,
    Custom,
    CustomGrammarFormat,
    CustomTool,
    Function,
    FunctionTool,
)

_INPUT = "input"
# The parts of `structured_outputs` for the syntaxes of grammars.
_GRAMMARS = {"lark": "grammar", "regex": "regex"}


def as_function(tool: AnyTool) -> FunctionTool | None:
    """Returns a tool as a function; None if it is neither a function nor a custom tool."""
    if isinstance(tool, CustomTool):
        return FunctionTool(type="function", function=_function_of(tool.custom))
    return tool if isinstance(tool, FunctionTool) else None


def _function_of(custom: Custom) -> Function:
    description = custom.description or ""
    if isinstance(custom.format, CustomGrammarFormat):
        grammar = custom.format.grammar
        description += (
            f"\n\nThe input keeps to this {grammar.syntax} grammar:\n{grammar.definition}"
        )
    parameters = {
        "type": "object",
        "properties": {_INPUT: {"type": "string"}},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    return Function(name=custom.name, description=description.strip(), parameters=parameters)


def grammar_of_input(tool: AnyTool) -> dict[str, Any] | None:
    """Returns the `structured_outputs` that the input of a tool keeps to, or None for any text."""
    if not isinstance(tool, CustomTool) or not isinstance(tool.custom.format, CustomGrammarFormat):
        return None
    grammar = tool.custom.format.grammar
    return {_GRAMMARS[grammar.syntax]: grammar.definition}


def arguments_with(text: str) -> dict[str, str]:
    """Returns the arguments of the function that stands for a custom tool."""
    return {_INPUT: text}


class CustomCalls:
    """Gives out the calls of custom tools with their input in place of arguments."""

    def __init__(self, parser: PieceParser, names: Collection[str]) -> None:
        """Makes a parser of another parser's pieces.

        Args:
            parser: The parser of the answer, which gives out each call as a whole.
            names: The names of the custom tools.
        """
        self.reasoning = parser.reasoning
        self._parser = parser
        self._names = names

    def push(self, text: str) -> Iterator[AnswerPiece]:
        """Yields the pieces that are certain with this text."""
        return map(self._read, self._parser.push(text))

    def finish(self) -> Iterator[AnswerPiece]:
        """Yields the remaining pieces."""
        return map(self._read, self._parser.finish())

    def _read(self, piece: AnswerPiece) -> AnswerPiece:
        if piece.kind != "call" or piece.name not in self._names:
            return piece
        # A model may write other arguments than it was told; the client gets what it wrote.
        arguments = json.loads(piece.text)
        text = arguments.get(_INPUT) if isinstance(arguments, dict) else None
        return piece._replace(text=text) if isinstance(text, str) else piece
