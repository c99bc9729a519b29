"""Reads answers by the response template that a tokenizer of transformers declares.

A model may bring it in tokenizer_config.json, where its chat template renders no calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxpage.chat_forms.forms import REASONING_FIELDS
from jaxpage.chat_forms.pieces import AnswerPiece, ReasoningPlaces, TextKind
from jaxpage.chat_forms.text_buffer import MismatchError
from jaxpage.chat_forms.tools import Tools

# (tools, prompt) -> transformers' `ResponseParser`.
NewResponseParser = Callable[[Sequence[Mapping[str, Any]], str], Any]


class DeclaredReader:
    """Turns the events of transformers' parser into pieces.

    A region that it cannot read is content, and so is all that follows. A region of calls that are
    none, or that no tool has the name of, is content, too.
    """

    def __init__(self, new_parser: NewResponseParser, tools: Tools, prompt: str) -> None:
        """Makes the reader of an answer.

        Args:
            new_parser: Makes transformers' parser.
            tools: The tools that may be called.
            prompt: The text that the answer continues.
        """
        functions = [
            {"type": "function", "function": {"name": name, "parameters": schema or {}}}
            for name, schema in (tools.schemas or {}).items()
        ]
        self._parser = new_parser(functions, prompt)
        self._tools = tools
        self._region: list[str] = []  # the text of the open region whose value comes at its end
        self._is_broken = False
        self.reasoning = ReasoningPlaces()
        self._thought: list[str] = []  # the text of the open region, if it is reasoning
        # The text that the regions read so far have not, and its place.
        self._unread: list[str] = []
        self._num_read = 0

    def push(self, text: str) -> Iterator[AnswerPiece]:
        """Yields the pieces that are certain with this text."""
        yield from self._read(lambda: self._parser.feed(text), text)

    def finish(self) -> Iterator[AnswerPiece]:
        """Yields the remaining pieces."""
        yield from self._read(lambda: self._parser.finalize()[1], "")

    def _read(
        self, read_events: Callable[[], list[dict[str, Any]]], text: str
    ) -> Iterator[AnswerPiece]:
        if self._is_broken:
            if text:
                yield AnswerPiece("content", text)
            return
        self._unread.append(text)
        try:
            events = read_events()
        except (ValueError, KeyError):
            self._is_broken = True
            self._end_thought()
            self.reasoning.is_over = True
            yield AnswerPiece("content", "".join(self._region) + text)
            return
        for event in events:
            yield from self._pieces(event)

    def _pieces(self, event: dict[str, Any]) -> Iterator[AnswerPiece]:
        is_call = event["field"] == "tool_calls"
        kind: TextKind = "reasoning" if event["field"] in REASONING_FIELDS else "content"
        if event["type"] == "region_chunk":
            if is_call or event["dirty"]:
                self._region.append(event["text"])
            else:
                yield self._piece(kind, event["text"])
        elif event["type"] == "region_close":
            text = "".join(self._region)
            self._region.clear()
            if is_call:
                yield from self._calls(event["value"], text)
            elif text:
                yield self._piece(kind, text)
            self._end_thought()

    def _piece(self, kind: TextKind, text: str) -> AnswerPiece:
        if kind == "reasoning":
            self._thought.append(text)
        return AnswerPiece(kind, text)

    def _end_thought(self) -> None:
        """Notes where the reasoning of a region is; the events do not say it."""
        thought = "".join(self._thought)
        self._thought.clear()
        if not thought:
            return
        unread = "".join(self._unread)
        begin = unread.find(thought)
        if begin >= 0:
            end = begin + len(thought)
            self.reasoning.begin(self._num_read + begin)
            self.reasoning.extend(len(thought))
            self._unread = [unread[end:]]
            self._num_read += end

    def _calls(self, value: Any, text: str) -> list[AnswerPiece]:
        """Returns the calls that the value of a region is, or its text as content."""
        calls = []
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function", call) if isinstance(call, dict) else None
            if not isinstance(function, dict):
                return [AnswerPiece("content", text)]
            try:
                calls.append(self._tools.call(function.get("name"), function.get("arguments")))
            except MismatchError:
                return [AnswerPiece("content", text)]
        return calls
