"""Makes the body of a chat of a request to POST /v1/responses."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxpage.serving.dialects.responses_fields import (
    ResponsesAllowedTools,
    ResponsesRequest,
    ResponsesSchemaFormat,
    ResponsesTool,
    ResponsesToolName,
)
from jaxpage.serving.dialects.responses_items import (
    ChatMessage,
    ChatMessages,
    ResponsesReference,
    SourcedItem,
    source_stored,
)
from jaxpage.serving.dialects.responses_truncation import fit_messages
from jaxpage.serving.requests.response_store import OwnerResponses
from jaxpage.serving.wire.chat_completions import open_chat
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.tokenizing import count_prompt
from jaxpage.settings.argument_checks import show
from jaxpage.settings.field_table import names_in

# The names of parameters in this API, by their names in chats.
_NAMES = names_in("responses")
_PREVIOUS = "previous_response_id"
# The id of an item begins with its kind, and has that of its response.
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_[0-9]+")


class RequestedConversation:
    """Holds what a request says, together with what the server has kept.

    Attributes:
        messages: The messages of the chat.
        items: The items as JSON, without instructions.
        ignored: The paths of what is passed over.
    """

    def __init__(
        self, request: ResponsesRequest, body: dict[str, Any], responses: OwnerResponses
    ) -> None:
        self._responses = responses
        self._outputs: dict[str, list[dict[str, Any]]] = {}  # by the ids of responses
        made = ChatMessages()
        made.add(self._previous(request))
        made.add(self._inputs(request, body))
        self.messages = made.messages
        if request.instructions is not None:
            message = {"role": "system", "content": request.instructions}
            paths = {"": "instructions", ".content": "instructions"}
            self.messages.insert(0, ChatMessage(message, paths))
        self.items = [item.body for item in made.items]
        self.ignored = tuple(made.ignored)

    def _previous(self, request: ResponsesRequest) -> list[SourcedItem]:
        if (previous := request.previous_response_id) is None:
            return []
        if not self._responses.keeps:
            message = (
                f"{_PREVIOUS} is not supported: the server keeps no responses "
                "(response_store_bytes is 0); send the conversation in input"
            )
            raise ApiError(400, message, param=_PREVIOUS)
        if (stored := self._responses.find(previous)) is None:
            message = f"Previous response with id {show(previous)} not found"
            raise ApiError(404, message, param=_PREVIOUS, code="previous_response_not_found")
        bodies = json.loads(stored.conversation) + json.loads(stored.response)["output"]
        return source_stored(bodies, _PREVIOUS)

    def _inputs(self, request: ResponsesRequest, body: dict[str, Any]) -> list[SourcedItem]:
        if isinstance(request.input, str):
            message = {"type": "message", "role": "user", "content": request.input}
            return source_stored([message], "input")
        items = []
        for index, item in enumerate(request.input):
            path = f"input[{index}]"
            if isinstance(item, ResponsesReference):
                items += source_stored([self._find_item(item.id, path)], path)
            else:
                items.append(SourcedItem(item, path, body["input"][index]))
        return items

    def _find_item(self, item_id: str, path: str) -> dict[str, Any]:
        """Returns an item of an answer that the server keeps."""
        match = _ITEM_ID.fullmatch(item_id)
        response_id = f"resp_{match[1]}" if match else ""
        if response_id not in self._outputs:
            stored = self._responses.find(response_id)
            self._outputs[response_id] = json.loads(stored.response)["output"] if stored else []
        for item in self._outputs[response_id]:
            if item["id"] == item_id:
                return item
        message = (
            f"{path}.id {show(item_id)} is not the id of an item that the server keeps; send the "
            "item itself"
        )
        raise ApiError(404, message, param=f"{path}.id", code="item_not_found")


def chat_of(request: ResponsesRequest) -> dict[str, Any]:
    """Returns the body of the chat but for its messages."""
    text_format = request.text.format if request.text else None
    if isinstance(text_format, ResponsesSchemaFormat):
        schema = text_format.model_dump(by_alias=True, exclude={"type"})
        response_format: dict[str, Any] | None = {"type": "json_schema", "json_schema": schema}
    else:
        response_format = text_format.model_dump() if text_format else None
    tools = [_chat_tool(tool) for tool in request.tools or []]
    choice = _chat_choice(request.tool_choice)
    thinking = request.reasoning
    return {
        "max_completion_tokens": request.max_output_tokens,
        "response_format": response_format,
        "stream": request.stream,
        "receipt": request.receipt,
        "tools": tools or None,
        "tool_choice": None if choice == "auto" and not tools else choice,
        "parallel_tool_calls": request.parallel_tool_calls if tools else None,
        "reasoning_effort": thinking.effort if thinking else None,
        "thinking_token_budget": thinking.max_tokens if thinking else None,
        "verbosity": request.text.verbosity if request.text else None,
        **{name: getattr(request, theirs) for name, theirs in _NAMES.items()},
    }


def _chat_tool(tool: Any) -> dict[str, Any]:
    """Returns a tool as chats have it; one that runs elsewhere is passed over there, too."""
    kind = tool.type
    if kind not in ("function", "custom"):
        return {"type": kind}
    # Unknown fields are named once, by the client's path.
    fields = tool.model_dump(exclude_none=True, include=set(type(tool).model_fields) - {"type"})
    if kind == "custom" and fields.get("format", {}).get("type") == "grammar":
        grammar = fields["format"]
        fields["format"] = {
            "type": "grammar",
            "grammar": {"syntax": grammar["syntax"], "definition": grammar["definition"]},
        }
    return {"type": kind, kind: fields}


def _chat_choice(choice: Any) -> Any:
    match choice:
        case ResponsesToolName():
            return {"type": choice.type, choice.type: {"name": choice.name}}
        case ResponsesAllowedTools():
            tools = [_chat_choice(tool) for tool in choice.tools]
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": choice.mode, "tools": tools},
            }
        case None | str():
            return choice
    return {"type": choice.type}


def names_of_tools(tools: list[ResponsesTool] | None) -> dict[str, str]:
    """Returns the client's paths of parts of tools, by those of chats."""
    names: dict[str, str] = {}
    for index in range(len(tools or [])):
        path = f"tools[{index}]"
        names |= {f"{path}.function": path, f"{path}.custom": path}
        names[f"{path}.custom.format.grammar"] = f"{path}.format"
    return names


def truncate_messages(
    messages: list[ChatMessage], request: ResponsesRequest, context: ModelContext
) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """Returns the messages for which the model has room, and those that are left out.

    An answer has room for its longest output or for an eighth of the model's length, and never
    needs more than half of it.
    """
    max_length = context.max_model_len
    num_reserved = min(request.max_output_tokens or max(1, max_length // 8), max_length // 2)
    body = {**chat_of(request), "model": request.model, "stream": None}

    def has_room(some: list[ChatMessage]) -> bool:
        try:
            chat = open_chat({**body, "messages": [message.body for message in some]}, context)
            (prompt,) = chat.prompts
            return count_prompt(prompt, context) + num_reserved <= max_length
        except ApiError as error:
            # The chat itself tells the client of other errors.
            return error.code != "context_length_exceeded"

    return fit_messages(messages, has_room)


def without_effect(request: ResponsesRequest, *, is_stored: bool) -> list[str]:
    """Returns the paths of fields that this server takes and has nothing for."""
    paths = []
    thinking = request.reasoning
    if thinking is not None:
        names = ("summary", "generate_summary")
        paths = [
            f"reasoning.{name}" for name in names if getattr(thinking, name) not in (None, "none")
        ]
    if request.service_tier not in (None, "auto", "default"):
        paths.append("service_tier")
    if request.store and not is_stored:
        paths.append("store")
    return paths
