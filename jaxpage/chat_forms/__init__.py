"""Reads tool calls and reasoning in the form that a model's chat template writes.

The form is derived from what the template renders, and is no list of known models:

    chat template ──derive──▶ ChatFormat ──parser──▶ PieceParser ──▶ content, reasoning, tool calls
                                         ──grammar_of──▶ the grammar of an answer that must call

`deriving` and the modules `deriving_*` find the form (`forms`); `round_trips` tries it. `answer`,
`headed` and `declared` read answers, and `calls` one tool call; `grammar` writes the grammar.
Enter by these names:

- `derive`: what a template's answers look like (`Derived`), given a `Render`.
- `ChatFormat`: the form of a model's answers; `MessageReader` reads one answer.
- `TOOL_FORMS`, `REASONING_FORMS`: forms that can be chosen by name; `CONTENT_FORMS`: the markers
  around the content that come with one of reasoning.
- `Tools`: the tools that an answer may call.
- `grammar_of`: the grammar of an answer that must call tools, in the model's own form;
  `grammar_of_text`: that of an answer whose text keeps to a rule, unless it calls a tool.
- `AnswerPiece`, `PieceParser`, `Plain`: the parts of an answer, and what gives them out;
  `ReasoningPlaces`: where its reasoning begins and ends.
"""

from jaxpage.chat_forms.chat_format import ChatFormat, MessageReader
from jaxpage.chat_forms.deriving import Derived, derive
from jaxpage.chat_forms.forms import CONTENT_FORMS, REASONING_FORMS, TOOL_FORMS
from jaxpage.chat_forms.grammar import grammar_of, grammar_of_text
from jaxpage.chat_forms.pieces import AnswerPiece, PieceParser, Plain, ReasoningPlaces
from jaxpage.chat_forms.probes import Render
from jaxpage.chat_forms.tools import Tools

__all__ = [
    "CONTENT_FORMS",
    "REASONING_FORMS",
    "TOOL_FORMS",
    "AnswerPiece",
    "ChatFormat",
    "Derived",
    "MessageReader",
    "PieceParser",
    "Plain",
    "ReasoningPlaces",
    "Render",
    "Tools",
    "derive",
    "grammar_of",
    "grammar_of_text",
]
