"""Answers other APIs by means of a chat or a completion.

The chunks and the response of the inner exchange are translated into the terms of the API.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxpage.outputs import RequestOutput
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError, rename_path
from jaxpage.serving.wire.exchange import Exchange

Open = Callable[[dict[str, Any], ModelContext], Exchange]
# With these options every chunk says how many tokens there were so far.
COUNTED = {"include_usage": True, "continuous_usage_stats": True}


class Translated:
    """An exchange that translates a chat or a completion with one choice."""

    load_seconds = 0.0
    _prefix: str  # begins the id
    _names: Mapping[str, str]  # the client's names of parameters by OpenAI's names

    def __init__(
        self,
        opens: Open,
        body: dict[str, Any],
        context: ModelContext,
        model: str,
        ignored_fields: tuple[str, ...],
    ) -> None:
        """Opens the inner exchange.

        Args:
            opens: The function that opens it.
            body: The body of the chat or completion.
            context: The served model and the server's settings.
            model: The name by which the client calls the model.
            ignored_fields: The paths of ignored fields of the client's request.

        Raises:
            ApiError: The request is refused; the error uses the client's names.
        """
        if body.get("stream"):
            body = {**body, "stream_options": COUNTED}
        try:
            self._inner = opens({"model": model, **body}, context)
        except ApiError as error:
            raise error.rename_param(self._names) from None
        self.id = f"{self._prefix}_{uuid.uuid4().hex}"
        self.stream = self._inner.stream
        self.prompts = self._inner.prompts
        cut = (rename_path(name, self._names) for name in self._inner.ignored_fields)
        self.ignored_fields = (*ignored_fields, *cut)
        self.model = model

    def refusal(self, error: Exception) -> ApiError:
        """Returns the client's error for a prompt that the engine refuses; see `Exchange`."""
        return self._inner.refusal(error).rename_param(self._names)

    def chunks(self, job_index: int, delta: RequestOutput) -> list[dict[str, Any]]:
        """Returns the chunks of a stream for a delta; see `Exchange`."""
        raise NotImplementedError

    def last_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks that end a stream; see `Exchange`."""
        raise NotImplementedError

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Returns the response where the request does not stream; see `Exchange`."""
        raise NotImplementedError


def pieces(choice: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the text of a choice as pairs ("reasoning" or "content", text)."""
    said = (
        {"content": choice["text"]}
        if "text" in choice
        else choice.get("delta", choice.get("message", {}))
    )
    for kind, name in (("reasoning", "reasoning_content"), ("content", "content")):
        if text := said.get(name):
            yield kind, text


class InBlocks(Translated):
    """An answer that is a list of blocks, each of reasoning or of content.

    A stream opens and closes them one after the other:

        begin ─ open(reasoning) ─ more ─ more ─ close ─ open(content) ─ more ─ close ─ end
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._blocks: list[tuple[str, list[str]]] = []  # only the last one is open
        self._ending: dict[str, Any] = {}  # the choice that has the finish reason
        self._usage: dict[str, Any] = {}
        self._has_begun = False

    def chunks(self, job_index: int, delta: RequestOutput) -> list[dict[str, Any]]:
        """Returns the chunks of a stream for a delta; see `Exchange`."""
        events = []
        for chunk in self._inner.chunks(job_index, delta):
            self._usage = chunk["usage"]
            if not self._has_begun:
                self._has_begun = True
                events += self._begin()
            for choice in chunk["choices"]:
                for kind, text in pieces(choice):
                    events += self._add_text(kind, text)
                if choice["finish_reason"] is not None:
                    self._ending = choice
        return events

    def last_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks that end a stream; see `Exchange`."""
        self._inner.last_chunks()
        events = (
            [] if self._blocks and self._blocks[-1][0] == "content" else self._next_block("content")
        )
        return [*events, *self._close_block(), *self._end()]

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Returns the response where the request does not stream; see `Exchange`."""
        response = self._inner.whole(outputs)
        self._usage = response["usage"]
        (self._ending,) = response["choices"]
        self._blocks = [(kind, [text]) for kind, text in pieces(self._ending)]
        if not self._blocks or self._blocks[-1][0] != "content":
            self._blocks.append(("content", []))
        return self._answer()

    def _add_text(self, kind: str, text: str) -> list[dict[str, Any]]:
        events = [] if self._blocks and self._blocks[-1][0] == kind else self._next_block(kind)
        self._blocks[-1][1].append(text)
        return [*events, self._more(kind, text)]

    def _next_block(self, kind: str) -> list[dict[str, Any]]:
        events = self._close_block() if self._blocks else []
        self._blocks.append((kind, []))
        return [*events, *self._open_block(kind)]

    def _begin(self) -> list[dict[str, Any]]:
        """Returns the events before all blocks."""
        raise NotImplementedError

    def _open_block(self, kind: str) -> list[dict[str, Any]]:
        """Returns the events that open the last block, which is empty."""
        raise NotImplementedError

    def _more(self, kind: str, text: str) -> dict[str, Any]:
        """Returns the event that adds text to the last block."""
        raise NotImplementedError

    def _close_block(self) -> list[dict[str, Any]]:
        """Returns the events that close the last block."""
        raise NotImplementedError

    def _end(self) -> list[dict[str, Any]]:
        """Returns the events after all blocks."""
        raise NotImplementedError

    def _answer(self) -> dict[str, Any]:
        """Returns the whole response."""
        raise NotImplementedError
