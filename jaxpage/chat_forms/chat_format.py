"""Holds the form of a model's answers, and makes readers of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpage.chat_forms.answer import AnswerReader
from jaxpage.chat_forms.declared import DeclaredReader, NewResponseParser
from jaxpage.chat_forms.forms import (
    ContentForm,
    HeaderForm,
    ReasoningForm,
    SentReasoning,
    ToolForm,
)
from jaxpage.chat_forms.headed import HeadedReader
from jaxpage.chat_forms.markers import trailing_space
from jaxpage.chat_forms.pieces import AnswerPiece, PieceParser, Plain
from jaxpage.chat_forms.tools import Tools


@dataclass(frozen=True)
class ChatFormat:
    """Holds the form of a model's answers.

    Attributes:
        tools: The form of tool calls, or None.
        reasoning: The form of reasoning, or None.
        content: The markers around the content.
        has_tools: True if the chat template renders tool calls, in whatever form, or its
            instructions show one.
        declared: Makes transformers' parser, where the tokenizer declares a response template and
            no form of calls is derived.
        headers: The form of headers, where answers are messages with headers; or None.
        sent: How the chat template takes the reasoning of earlier answers.
    """

    tools: ToolForm | None = None
    reasoning: ReasoningForm | None = None
    content: ContentForm = field(default_factory=ContentForm)
    has_tools: bool = False
    declared: NewResponseParser | None = None
    headers: HeaderForm | None = None
    sent: SentReasoning = field(default_factory=SentReasoning)

    @property
    def tool_form(self) -> str | None:
        """Returns the short name of the form of tool calls, or None."""
        if self.tools is not None:
            return self.tools.name
        return None if self.declared is None else "response_template"

    @property
    def reasoning_form(self) -> str | None:
        """Returns the short name of the form of reasoning, or None."""
        return None if self.reasoning is None else self.reasoning.name

    def reader(
        self, tools: Sequence[Mapping[str, Any]] | None = None, prompt: str = ""
    ) -> MessageReader:
        """Returns the reader of one answer.

        Args:
            tools: The tools that may be called, as in a request; None for any.
            prompt: The rendered text that the model continues.
        """
        schemas = None
        if tools is not None:
            # A tool of the Responses API has the fields of `function` itself.
            functions = [tool.get("function", tool) for tool in tools]
            schemas = {
                str(function.get("name")): function.get("parameters") for function in functions
            }
        return MessageReader(self.parser(Tools(schemas), prompt))

    def parser(self, tools: Tools | None, prompt: str) -> PieceParser:
        """Returns the parser of one answer.

        Args:
            tools: The tools that may be called; None if calls are content.
            prompt: The rendered text that the model continues.
        """
        form = None if tools is None else self.tools
        if tools is not None and form is None and self.declared is not None:
            return DeclaredReader(self.declared, tools, prompt)
        if self.headers is not None:
            reads = self.reasoning is not None
            return HeadedReader(self.headers, form, tools, reads_reasoning=reads, prompt=prompt)
        if form is None and self.reasoning is None and not self.content.opens:
            return Plain()
        return AnswerReader(
            form,
            tools,
            self.reasoning,
            self.content,
            is_open=self.is_open(prompt),
            space=self._space_after(prompt),
        )

    def markers(self, *, with_tools: bool) -> tuple[str, ...]:
        """Returns the markers that a reader looks for.

        Args:
            with_tools: True if it reads calls.
        """
        markers = [*self.tools.markers] if with_tools and self.tools is not None else []
        if self.reasoning is not None:
            markers += [self.reasoning.open, self.reasoning.close]
        markers += [*self.content.opens, *self.content.closes]
        if self.headers is not None:
            markers += [self.headers.start, self.headers.channel, self.headers.body]
        return tuple(markers)

    def is_open(self, prompt: str) -> bool:
        """Returns whether a prompt ends within the reasoning."""
        form = self.reasoning
        if form is None:
            return False
        opened = form.open.strip()
        if not form.header.strip():
            return prompt.rstrip().endswith(opened)
        begin = prompt.rfind(opened)
        others = (prompt.rfind(form.close.strip()), prompt.rfind(form.header))
        # The header may end with what the opening marker begins with, so it counts where it begins.
        return begin >= 0 and begin > max(others)

    def _space_after(self, prompt: str) -> str:
        """Returns the white space after the reasoning that a prompt leaves to the answer."""
        close = "" if self.reasoning is None else self.reasoning.close
        if not close.strip() or not prompt.rstrip().endswith(close.strip()):
            return ""
        return trailing_space(close).removeprefix(trailing_space(prompt))


class MessageReader:
    """Reads one answer as deltas, and as a message at the end."""

    def __init__(self, parser: PieceParser) -> None:
        self._parser = parser
        self._texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        self._calls: list[dict[str, str]] = []

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Returns what is certain with this text, as deltas of a stream.

        A delta has "content", "reasoning_content", or "tool_calls" with the "index", the "name" and
        the "arguments" of a call.
        """
        return [self._delta(piece) for piece in self._parser.push(text)]

    def finish(self) -> dict[str, Any]:
        """Returns the whole message: "content", "reasoning_content" and "tool_calls"."""
        for piece in self._parser.finish():
            self._delta(piece)
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        return {**texts, "tool_calls": [dict(call) for call in self._calls]}

    def _delta(self, piece: AnswerPiece) -> dict[str, Any]:
        if piece.kind == "call":
            call = {"name": piece.name, "arguments": piece.text}
            self._calls.append(call)
            return {"tool_calls": [{"index": len(self._calls) - 1, **call}]}
        name = "content" if piece.kind == "content" else "reasoning_content"
        self._texts[name].append(piece.text)
        return {name: piece.text}
