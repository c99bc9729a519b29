"""Defines the items of a conversation in OpenAI's Responses, and makes messages of a chat of them.

The items of one answer become one message of the assistant, and each result a message:

    reasoning ─┐
    message    ├─▶ assistant: reasoning_content, content, tool_calls
    call, call ┘
    output ──────▶ tool
    output ──────▶ tool
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from jaxpage.serving.wire.field_types import CallId, Items, Name, RequestObject, by_name
from jaxpage.serving.wire.request_fields import RefusalPart
from jaxpage.serving.wire.tool_fields import OtherTool, type_of
from jaxpage.settings.field_table import Field as Line

# What begins the `encrypted_content` of this server: its reasoning, as base64 of UTF-8.
_READABLE = "jaxpage-reasoning:"
# Calls and results of tools that run elsewhere; new ones come with every version of an agent.
_OF_OTHER_TOOLS = re.compile(r"\w+_(call|output)|mcp_\w+|ghost_snapshot|program")


class ResponsesPart(RequestObject):
    """A part of a message that is text."""

    added = frozenset({"annotations", "logprobs", "parsed"})

    type: Literal["input_text", "output_text"]
    text: str


class ResponsesImage(RequestObject):
    """A part of a message that is a picture, as a data URL."""

    # The processor of the model decides on the size. Files are not kept.
    known = by_name(Line("detail", neutral=("auto",)), Line("file_id"))

    type: Literal["input_image"]
    image_url: str

    @model_validator(mode="before")
    @classmethod
    def _refuse_files(cls, part: Any) -> Any:
        if isinstance(part, dict) and part.get("file_id") and not part.get("image_url"):
            raise ValueError(
                "cannot be a file_id: no files of pictures are kept, so send the picture itself, "
                "as a data URL in image_url"
            )
        return part


def _text_or_parts(value: Any) -> str:
    """Returns a tag, so that an error names the part that is wrong."""
    return "a text" if isinstance(value, str) else "parts"


_Parts = Items[Annotated[ResponsesPart | ResponsesImage | RefusalPart, Field(discriminator="type")]]
_Results = Items[Annotated[ResponsesPart | ResponsesImage, Field(discriminator="type")]]


class ResponsesMessage(RequestObject):
    """A message of a conversation, in the Responses API."""

    added = frozenset({"id", "phase", "status"})

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        Annotated[str, Tag("a text")] | Annotated[_Parts, Tag("parts")],
        Discriminator(_text_or_parts),
    ]


class ReasoningText(RequestObject):
    """A part of a reasoning item."""

    type: Literal["reasoning_text", "text"]
    text: str


class ResponsesReasoning(RequestObject):
    """The reasoning of an earlier answer, before what the answer says and calls."""

    added = frozenset({"id", "status", "summary"})

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str | None:
        """Returns the reasoning; None if it is neither in the content nor readable otherwise."""
        if self.content:
            return "".join(part.text for part in self.content)
        return decode_reasoning(self.encrypted_content or "")


class ResponsesFunctionCall(RequestObject):
    """A call of a function, which an earlier answer made."""

    added = frozenset({"caller", "id", "status"})

    type: Literal["function_call"]
    call_id: CallId
    name: Name
    arguments: str


class ResponsesCustomCall(RequestObject):
    """A call of a custom tool, which an earlier answer made."""

    added = frozenset({"caller", "id", "status"})

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: Name
    input: str


class ResponsesOutput(RequestObject):
    """The result of a call."""

    added = frozenset({"caller", "id", "name", "status"})

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: Annotated[
        Annotated[str, Tag("a text")] | Annotated[_Results, Tag("parts")],
        Discriminator(_text_or_parts),
    ]


class ResponsesReference(RequestObject):
    """Names an item of an answer that the server keeps."""

    type: Literal["item_reference"] | None = None
    id: Annotated[str, Field(min_length=1, max_length=256)]


class ResponsesCompaction(RequestObject):
    """A conversation that another server has shortened and encrypted; it is refused."""

    type: Literal["compaction", "compaction_summary"]


class ResponsesOtherItem(OtherTool):
    """A call or a result of a tool that runs elsewhere; it is passed over."""


def _kind_of_item(item: Any) -> str:
    kind = type_of(item)
    if kind is None:
        has_role = "role" in item if isinstance(item, dict) else hasattr(item, "role")
        has_id = "id" in item if isinstance(item, dict) else hasattr(item, "id")
        return "a reference" if has_id and not has_role else "a message"
    if kind in _KINDS:
        return _KINDS[kind]
    is_other = isinstance(kind, str) and _OF_OTHER_TOOLS.fullmatch(kind)
    return "an item of another tool" if is_other else "a message"


_KINDS = {
    "reasoning": "reasoning",
    "function_call": "a call",
    "custom_tool_call": "a custom call",
    "function_call_output": "a result",
    "custom_tool_call_output": "a result",
    "item_reference": "a reference",
    "compaction": "a compaction",
    "compaction_summary": "a compaction",
}
ResponsesItem = Annotated[
    Annotated[ResponsesMessage, Tag("a message")]
    | Annotated[ResponsesReasoning, Tag("reasoning")]
    | Annotated[ResponsesFunctionCall, Tag("a call")]
    | Annotated[ResponsesCustomCall, Tag("a custom call")]
    | Annotated[ResponsesOutput, Tag("a result")]
    | Annotated[ResponsesReference, Tag("a reference")]
    | Annotated[ResponsesCompaction, Tag("a compaction")]
    | Annotated[ResponsesOtherItem, Tag("an item of another tool")],
    Discriminator(_kind_of_item),
]
_ADAPTER = TypeAdapter(list[ResponsesItem])


def encode_reasoning(text: str) -> str:
    """Returns reasoning as the `encrypted_content` of an item. It is encoded, not encrypted."""
    return _READABLE + base64.b64encode(text.encode()).decode()


def decode_reasoning(content: str) -> str | None:
    """Returns the reasoning in an `encrypted_content`, or None if another server made it."""
    if not content.startswith(_READABLE):
        return None
    try:
        return base64.b64decode(content.removeprefix(_READABLE), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


class SourcedItem(NamedTuple):
    """Holds an item, and where it is from.

    Attributes:
        item: The item.
        path: Its path in the request.
        body: The item as JSON.
    """

    item: RequestObject
    path: str
    body: dict[str, Any]


def source_stored(bodies: list[dict[str, Any]], path: str) -> list[SourcedItem]:
    """Returns items that the server has kept.

    Args:
        bodies: The items as JSON.
        path: The path of the field of the request that names them.
    """
    items = _ADAPTER.validate_python(bodies)
    return [SourcedItem(item, path, body) for item, body in zip(items, bodies, strict=True)]


@dataclass
class ChatMessage:
    """Holds a message of a chat.

    Attributes:
        body: The message.
        paths: The client's paths of its parts, by the ends of their paths in the chat.
    """

    body: dict[str, Any]
    paths: dict[str, str] = field(default_factory=dict)

    def names(self, index: int) -> dict[str, str]:
        """Returns the client's paths by those of the chat, in which the message has an index."""
        return {f"messages[{index}]{end}": path for end, path in self.paths.items()}


class ChatMessages:
    """Makes messages of items.

    Attributes:
        messages: The messages so far.
        items: The items that they are made of.
        ignored: The paths of items that are passed over, or whose reasoning nobody can read.
    """

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.items: list[SourcedItem] = []
        self.ignored: list[str] = []
        self._open: ChatMessage | None = None  # the message of an answer that may have more items
        self._passed_over: set[str] = set()  # the ids of calls

    def add(self, items: Iterable[SourcedItem]) -> None:
        """Adds items, of which none is a reference."""
        for source in items:
            number = len(self.ignored)
            self._add(source)
            if len(self.ignored) == number:
                self.items.append(source)

    def _add(self, source: SourcedItem) -> None:
        match source.item:
            case ResponsesMessage():
                self._add_message(source.item, source.path)
            case ResponsesReasoning():
                self._add_reasoning(source.item, source.path)
            case ResponsesFunctionCall() as call:
                called = {"name": call.name, "arguments": call.arguments}
                self._add_call("function", call.call_id, called, source.path)
            case ResponsesCustomCall() as call:
                called = {"name": call.name, "input": call.input}
                self._add_call("custom", call.call_id, called, source.path)
            case ResponsesOutput():
                self._add_output(source.item, source.path)
            case _:
                self._pass_over(source)

    def _begin(self, path: str, **fields: Any) -> ChatMessage:
        message = ChatMessage(fields, {"": path, ".content": f"{path}.content"})
        self.messages.append(message)
        return message

    def _begin_answer(self, path: str) -> ChatMessage:
        self._open = self._begin(path, role="assistant", content=None)
        return self._open

    def _add_message(self, item: ResponsesMessage, path: str) -> None:
        content, paths = _content_of(item.content, f"{path}.content")
        if item.role != "assistant":
            self._open = None
            self._begin(path, role=item.role, content=content).paths |= paths
            return
        message = self._open
        if message is None or message.body["content"]:
            message = self._begin_answer(path)
        message.body["content"] = content
        message.paths[".content"] = f"{path}.content"

    def _add_reasoning(self, item: ResponsesReasoning, path: str) -> None:
        text = item.text
        if text is None:
            if item.encrypted_content:
                self.ignored.append(f"{path}.encrypted_content")
            return
        message = self._open
        if message is None or (message.body["content"] and "tool_calls" not in message.body):
            message = self._begin_answer(path)
            # An answer may have been cut before it said anything.
            message.body["content"] = ""
        before = message.body.get("reasoning_content")
        message.body["reasoning_content"] = f"{before}\n\n{text}" if before else text

    def _add_call(self, kind: str, call_id: str, called: dict[str, Any], path: str) -> None:
        message = self._open or self._begin_answer(path)
        calls = message.body.setdefault("tool_calls", [])
        place = f".tool_calls[{len(calls)}]"
        message.paths |= {
            place: path,
            f"{place}.id": f"{path}.call_id",
            f"{place}.{kind}": path,
        }
        calls.append({"id": call_id, "type": kind, kind: called})

    def _add_output(self, item: ResponsesOutput, path: str) -> None:
        if item.call_id in self._passed_over:
            self.ignored.append(path)
            return
        self._open = None
        content, paths = _content_of(item.output, f"{path}.output")
        message = self._begin(path, role="tool", tool_call_id=item.call_id, content=content)
        message.paths |= {".content": f"{path}.output", ".tool_call_id": f"{path}.call_id"}
        message.paths |= paths

    def _pass_over(self, source: SourcedItem) -> None:
        self.ignored.append(source.path)
        if isinstance(call_id := source.body.get("call_id"), str):
            self._passed_over.add(call_id)


def _content_of(content: str | list[Any], path: str) -> tuple[Any, dict[str, str]]:
    """Returns the content of a message of a chat, and the client's paths of its pictures."""
    if isinstance(content, str):
        return content, {}
    parts: list[dict[str, Any]] = []
    paths = {}
    for index, part in enumerate(content):
        if isinstance(part, ResponsesImage):
            parts.append({"type": "image_url", "image_url": {"url": part.image_url}})
            paths[f".content[{index}]"] = f"{path}[{index}]"
            paths[f".content[{index}].image_url.url"] = f"{path}[{index}].image_url"
        elif isinstance(part, RefusalPart):
            parts.append({"type": "refusal", "refusal": part.refusal})
        else:
            parts.append({"type": "text", "text": part.text})
    return parts, paths
