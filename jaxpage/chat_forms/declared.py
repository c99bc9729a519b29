"""Reads answers by the response template that a tokenizer of transformers declares.

A model may bring it in tokenizer_config.json, where its chat template renders no calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxpage.chat_forms.pieces import Piece

# (tools, prompt) -> transformers' `ResponseParser`.
NewResponseParser = Callable[[Sequence[Mapping[str, Any]], str], Any]
_THOUGHTS = {"reasoning_content", "reasoning", "thinking", "thought"}


class DeclaredReader:
    """Turns the events of transformers' parser into pieces.

    A region that it cannot read is content, and so is all that follows.
    """

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self._region: list[str] = []  # the text of the open region whose value comes at its end
        self._is_broken = False

    def push(self, text: str) -> Iterator[Piece]:
        """Yields the pieces that are certain with this text."""
        yield from self._read(lambda: self._parser.feed(text), text)

    def finish(self) -> Iterator[Piece]:
        """Yields the remaining pieces."""
        yield from self._read(lambda: self._parser.finalize()[1], "")

    def _read(self, events: Callable[[], list[dict[str, Any]]], text: str) -> Iterator[Piece]:
        if self._is_broken:
            if text:
                yield Piece("content", text)
            return
        try:
            found = events()
        except (ValueError, KeyError):
            self._is_broken = True
            yield Piece("content", "".join(self._region) + text)
            return
        for event in found:
            yield from self._piece(event)

    def _piece(self, event: dict[str, Any]) -> Iterator[Piece]:
        field = event["field"]
        if event["type"] == "region_open":
            self._region.clear()
        elif event["type"] == "region_chunk":
            if field == "tool_calls" or event["dirty"]:
                self._region.append(event["text"])
            else:
                yield Piece("reasoning" if field in _THOUGHTS else "content", event["text"])
        elif field == "tool_calls":
            value = event["value"]
            for call in value if isinstance(value, list) else [value]:
                function = call.get("function", call)
                arguments = function.get("arguments", {})
                written = arguments if isinstance(arguments, str) else json.dumps(arguments)
                yield Piece("call", written, str(function.get("name", "")))
