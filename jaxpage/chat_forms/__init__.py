"""Reads tool calls and reasoning in the form that a model's chat template writes.

The form is derived from what the template renders, and is no list of known models:

    chat template ──derive──▶ ChatFormat ──parser──▶ PieceParser ──▶ content, reasoning, tool calls
                                         ──grammar_of──▶ the grammar of an answer that must call

`deriving` and the modules `deriving_*` find the form (`forms`); `round_trips` tries it. `answer`,
`headed` and `declared` read answers, and `calls` one tool call; `grammar` writes the grammar.
"""

from jaxpage.chat_forms.chat_format import (
    ChatFormat,  # is the form of a model's answers
    MessageReader,  # reads one answer
)
from jaxpage.chat_forms.deriving import (
    Derived,  # says what a template's answers look like
    derive,  # finds it, given a `Render`
)
from jaxpage.chat_forms.forms import (
    CONTENT_FORMS,  # are the markers around the content that come with a form of reasoning
    REASONING_FORMS,  # are forms of reasoning that can be chosen by name
    TOOL_FORMS,  # are forms of tool calls that can be chosen by name
)
from jaxpage.chat_forms.grammar import (
    grammar_of,  # writes the grammar of an answer that must call tools, in the model's own form
    grammar_of_text,  # writes that of an answer whose text keeps to a rule, unless it calls a tool
)
from jaxpage.chat_forms.pieces import (
    AnswerPiece,  # is a part of an answer
    PieceParser,  # gives out the parts
    Plain,  # gives out an answer that has no form
    ReasoningPlaces,  # says where the reasoning of an answer begins and ends
)
from jaxpage.chat_forms.probes import Render  # renders a conversation by a chat template
from jaxpage.chat_forms.tools import Tools  # holds the tools that an answer may call
