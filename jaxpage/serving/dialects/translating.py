"""Answers other APIs by means of a chat or a completion.

The chunks and the response of the inner exchange are translated into the terms of the API.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
        self.ignored_fields = tuple(dict.fromkeys((*ignored_fields, *cut)))
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


class AnswerPart(NamedTuple):
    """Holds a part of an answer.

    Attributes:
        kind: The kind: "reasoning", "content", "function" or "custom"; the last two are calls.
        text: The text; for a call its arguments, as JSON, or the input of a custom tool.
        place: The place of the call among the answer's calls; 0 for text.
        call_id: The id of the call where it begins; empty otherwise.
        name: The name of the tool where the call begins; empty otherwise.
    """

    kind: str
    text: str
    place: int = 0
    call_id: str = ""
    name: str = ""

    def make_block(self) -> AnswerBlock:
        """Returns an empty block for the part."""
        return AnswerBlock(self.kind, self.place, self.call_id, self.name)


def parts_of(choice: Mapping[str, Any]) -> Iterator[AnswerPart]:
    """Yields the parts of a choice."""
    message = (
        {"content": choice["text"]}
        if "text" in choice
        else choice.get("delta", choice.get("message", {}))
    )
    for kind, name in (("reasoning", "reasoning_content"), ("content", "content")):
        if text := message.get(name):
            yield AnswerPart(kind, text)
    for index, call in enumerate(message.get("tool_calls", ())):
        kind = "custom" if "custom" in call else "function"
        called = call[kind]
        text = called["input" if kind == "custom" else "arguments"]
        yield AnswerPart(
            kind, text, call.get("index", index), call.get("id", ""), called.get("name", "")
        )


@dataclass
class AnswerBlock:
    """A block of an answer: text of one kind, or a call.

    Attributes:
        kind: The kind of its parts; see `AnswerPart`.
        place: The place of the call among the answer's calls; 0 for text.
        call_id: The id of the call; empty for text.
        name: The name of the tool; empty for text.
        texts: The texts of its parts so far.
    """

    kind: str
    place: int = 0
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Returns the text so far."""
        return "".join(self.texts)

    @property
    def is_call(self) -> bool:
        """Returns whether it is a call."""
        return self.kind in ("function", "custom")

    def has(self, part: AnswerPart) -> bool:
        """Returns whether a part belongs to the block."""
        return (self.kind, self.place) == (part.kind, part.place)


class InBlocks(Translated):
    """An answer that is a list of blocks, each of reasoning, of content, or a call.

    A stream opens and closes them one after the other:

        begin ─ open(reasoning) ─ more ─ more ─ close ─ open(function) ─ more ─ close ─ end

    An answer without content and calls gets an empty block of content.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._blocks: list[AnswerBlock] = []  # only the last one is open
        self._ending: dict[str, Any] = {}  # the choice that has the finish reason
        self._usage: dict[str, Any] = {}
        self._receipt: dict[str, Any] = {}  # the field of the end, if a receipt is asked for
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
                for part in parts_of(choice):
                    events += self._add_part(part)
                if choice["finish_reason"] is not None:
                    self._ending = choice
        return events

    def last_chunks(self) -> list[dict[str, Any]]:
        """Returns the chunks that end a stream; see `Exchange`."""
        for chunk in self._inner.last_chunks():
            self._receipt = _receipt_of(chunk)
        events = self._next_block(AnswerBlock("content")) if self._lacks_content() else []
        return [*events, *self._close_block(self._blocks[-1]), *self._end()]

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Returns the response where the request does not stream; see `Exchange`."""
        response = self._inner.whole(outputs)
        self._usage = response["usage"]
        self._receipt = _receipt_of(response)
        (self._ending,) = response["choices"]
        # A message has all of its text in one field; chunks have the parts in order.
        for chunk in self._inner.chunks(0, outputs[0]):
            for choice in chunk["choices"]:
                for part in parts_of(choice):
                    if not self._blocks or not self._blocks[-1].has(part):
                        self._blocks.append(part.make_block())
                    self._blocks[-1].texts.append(part.text)
        if self._lacks_content():
            self._blocks.append(AnswerBlock("content"))
        return self._answer()

    @property
    def _has_calls(self) -> bool:
        return any(block.is_call for block in self._blocks)

    def _lacks_content(self) -> bool:
        return all(block.kind == "reasoning" for block in self._blocks)

    def _add_part(self, part: AnswerPart) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if not self._blocks or not self._blocks[-1].has(part):
            events = self._next_block(part.make_block())
        block = self._blocks[-1]
        block.texts.append(part.text)
        return [*events, *self._add_to_block(block, part.text)]

    def _next_block(self, block: AnswerBlock) -> list[dict[str, Any]]:
        events = self._close_block(self._blocks[-1]) if self._blocks else []
        self._blocks.append(block)
        return [*events, *self._open_block(block)]

    def _begin(self) -> list[dict[str, Any]]:
        """Returns the events before all blocks."""
        raise NotImplementedError

    def _open_block(self, block: AnswerBlock) -> list[dict[str, Any]]:
        """Returns the events that open the last block, which is empty."""
        raise NotImplementedError

    def _add_to_block(self, block: AnswerBlock, text: str) -> list[dict[str, Any]]:
        """Returns the events that add text to the last block."""
        raise NotImplementedError

    def _close_block(self, block: AnswerBlock) -> list[dict[str, Any]]:
        """Returns the events that close the last block."""
        raise NotImplementedError

    def _end(self) -> list[dict[str, Any]]:
        """Returns the events after all blocks."""
        raise NotImplementedError

    def _answer(self) -> dict[str, Any]:
        """Returns the whole response."""
        raise NotImplementedError


def _receipt_of(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"receipt": body["receipt"]} if "receipt" in body else {}
