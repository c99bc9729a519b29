"""Translates requests to POST /v1/responses into chats.

Only text is supported. The server keeps the answers for a while, within bounds, so that a request
may go on from one of them by `previous_response_id`, or name items of them.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

from jaxpage.outputs import RequestOutput
from jaxpage.serving.dialects.dialect import Dialect
from jaxpage.serving.dialects.responses_fields import (
    DOCUMENT,
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
    encode_reasoning,
    source_stored,
)
from jaxpage.serving.dialects.responses_truncation import fit_messages
from jaxpage.serving.dialects.translating import Block, InBlocks
from jaxpage.serving.requests.response_store import (
    KEEPS_NOTHING,
    OwnerResponses,
    StoredResponse,
)
from jaxpage.serving.wire.chat_completions import open_chat
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.encoding import encode_parts, numbered_events
from jaxpage.serving.wire.errors import ApiError, quotes
from jaxpage.serving.wire.reading import read
from jaxpage.serving.wire.relaxing import name_paths
from jaxpage.settings.argument_checks import show
from jaxpage.settings.field_table import names_in

# The names of parameters in this API, by their names in chats.
_NAMES = names_in("responses")
_PREVIOUS = "previous_response_id"
# The id of an item begins with its kind, and has that of its response.
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_[0-9]+")
_PREFIXES = {"reasoning": "rs", "content": "msg", "function": "fc", "custom": "ctc"}


@quotes
def open_response(
    body: dict[str, Any], context: ModelContext, responses: OwnerResponses = KEEPS_NOTHING
) -> ResponseAnswer:
    """Returns the exchange of a request to POST /v1/responses.

    Args:
        body: The request.
        context: The served model and the server's settings.
        responses: The answers that are kept for the client.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(body, ResponsesRequest, context)
    return ResponseAnswer(request, body, context, responses, ignored)


class _Conversation:
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
            said = {"type": "message", "role": "user", "content": request.input}
            return source_stored([said], "input")
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
        message = f"{path}.id {show(item_id)} is not the id of an item that the server keeps; send the item itself"
        raise ApiError(404, message, param=f"{path}.id", code="item_not_found")


def _chat_of(request: ResponsesRequest) -> dict[str, Any]:
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


def _names_of_tools(tools: list[ResponsesTool] | None) -> dict[str, str]:
    """Returns the client's paths of parts of tools, by those of chats."""
    names: dict[str, str] = {}
    for index in range(len(tools or [])):
        path = f"tools[{index}]"
        names |= {f"{path}.function": path, f"{path}.custom": path}
        names[f"{path}.custom.format.grammar"] = f"{path}.format"
    return names


def _truncated(
    messages: list[ChatMessage], request: ResponsesRequest, context: ModelContext
) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """Returns the messages for which the model has room, and those that are left out.

    An answer has room for its longest output or for an eighth of the model's length, and never
    needs more than half of it.
    """
    longest = context.max_model_len
    num_reserved = min(request.max_output_tokens or max(1, longest // 8), longest // 2)
    body = {**_chat_of(request), "model": request.model, "stream": None}

    def has_room(some: list[ChatMessage]) -> bool:
        try:
            chat = open_chat({**body, "messages": [message.body for message in some]}, context)
        except ApiError as error:
            # The chat itself tells the client of other errors.
            return error.code != "context_length_exceeded"
        (prompt,) = chat.prompts
        special = prompt.add_special_tokens
        encoded = context.tokenizer(prompt.prompt, add_special_tokens=special)  # type: ignore[misc]  # it has a template
        return len(encoded["input_ids"]) + num_reserved <= longest

    return fit_messages(messages, has_room)


class ResponseAnswer(InBlocks):
    """Answers with one response, whose blocks are output items."""

    _prefix = "resp"
    _names = {  # noqa: RUF012
        **dict.fromkeys(("messages", "prompt"), "input"),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "response_format.json_schema.schema": "text.format.schema",
        "thinking_token_budget": "reasoning.max_tokens",
        "tool_choice.allowed_tools": "tool_choice",
        "tool_choice.custom": "tool_choice",
        "tool_choice.function": "tool_choice",
        "verbosity": "text.verbosity",
    }

    def __init__(
        self,
        request: ResponsesRequest,
        body: dict[str, Any],
        context: ModelContext,
        responses: OwnerResponses,
        ignored_fields: tuple[str, ...],
    ) -> None:
        """Opens the chat.

        Args:
            request: The request.
            body: The request as JSON.
            context: The served model and the server's settings.
            responses: The answers that are kept for the client.
            ignored_fields: The paths of ignored fields.

        Raises:
            ApiError: The request is refused.
        """
        conversation = _Conversation(request, body, responses)
        messages = conversation.messages
        dropped: list[ChatMessage] = []
        if request.truncation == "auto":
            messages, dropped = _truncated(messages, request, context)
        self._names = {**type(self)._names, **_names_of_tools(request.tools)}
        for index, message in enumerate(messages):
            self._names |= message.names(index)
        chat = {**_chat_of(request), "messages": [message.body for message in messages]}
        paths = (*conversation.ignored, *(message.paths[""] for message in dropped))
        self._responses = responses
        self._conversation = b"".join(encode_parts(conversation.items))
        self._is_stored = request.store is not False and responses.has_room(self._conversation)
        ignored = (*ignored_fields, *_without_effect(request, is_stored=self._is_stored))
        ignored += name_paths(tuple(dict.fromkeys(paths)))
        super().__init__(open_chat, chat, context, request.model, ignored)
        self._request = request
        self._body = body
        self._shows_encoded = "reasoning.encrypted_content" in (request.include or ())
        self._created = int(time.time())

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Returns the response where the request does not stream; see `Exchange`."""
        answer = super().whole(outputs)
        self._keep(answer)
        return answer

    def _keep(self, answer: dict[str, Any]) -> None:
        """Keeps an answer that has ended; it is there before the client knows of it."""
        if self._is_stored:
            response = b"".join(encode_parts(answer))
            self._responses.put(self.id, StoredResponse(self._conversation, response))

    def _answer(self) -> dict[str, Any]:
        request = self._request
        params = self.prompts[0].params
        is_cut = self._ending.get("finish_reason") == "length"
        last = len(self._blocks) - 1
        output = [
            self._item(index, self._status if index == last else "completed")
            for index in range(last + 1)
        ]
        text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._ending else None,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": self._body.get("prompt_cache_key"),
            "reasoning": {
                "effort": request.reasoning.effort if request.reasoning else None,
                "summary": None,
            },
            "safety_identifier": self._body.get("safety_identifier"),
            "service_tier": "default",
            "store": self._is_stored,
            "temperature": getattr(params, "temperature", None),
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": self._body.get("tool_choice") or "auto",
            "tools": self._body.get("tools") or [],
            "top_logprobs": 0,
            "top_p": getattr(params, "top_p", None),
            "truncation": request.truncation or "disabled",
            "usage": self._usage_body() if self._ending else None,
            "user": request.user,
        }

    @property
    def _status(self) -> str:
        if not self._ending:
            return "in_progress"
        return "incomplete" if self._ending["finish_reason"] == "length" else "completed"

    def _usage_body(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def _item(self, index: int, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        block = self._blocks[index]
        begin = {"id": self._item_id(index), "status": status}
        if block.is_call:
            kind, text_field = _call_names(block.kind)
            text = "" if is_empty else block.text
            called = {"call_id": block.call_id, "name": block.name, text_field: text}
            return {**begin, "type": kind, **called}
        content = [] if is_empty else [self._part(index)]
        if block.kind != "reasoning":
            return {**begin, "type": "message", "role": "assistant", "content": content}
        item: dict[str, Any] = {**begin, "type": "reasoning", "summary": [], "content": content}
        if self._shows_encoded:
            item["encrypted_content"] = None if is_empty else encode_reasoning(block.text)
        return item

    def _item_id(self, index: int) -> str:
        prefix = _PREFIXES[self._blocks[index].kind]
        return f"{prefix}_{self.id.removeprefix('resp_')}_{index}"

    def _part(self, index: int) -> dict[str, Any]:
        block = self._blocks[index]
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{name}", **fields}

    def _begin(self) -> list[dict[str, Any]]:
        return [self._event(name, response=self._answer()) for name in ("created", "in_progress")]

    def _open_block(self, block: Block) -> list[dict[str, Any]]:
        index = len(self._blocks) - 1
        item = self._item(index, "in_progress", is_empty=True)
        added = self._event("output_item.added", output_index=index, item=item)
        if block.is_call:
            return [added]
        return [added, self._event("content_part.added", **self._place, part=self._part(index))]

    def _add_to_block(self, block: Block, text: str) -> list[dict[str, Any]]:
        return [self._text_event(block.kind, "delta", delta=text)] if text else []

    def _close_block(self, block: Block) -> list[dict[str, Any]]:
        index = len(self._blocks) - 1
        status = self._status if self._ending else "completed"
        done = self._event("output_item.done", output_index=index, item=self._item(index, status))
        if block.is_call:
            _, text_field = _call_names(block.kind)
            said = {text_field: block.text, "name": block.name}
            return [self._text_event(block.kind, "done", **said), done]
        part = self._part(index)
        return [
            self._text_event(block.kind, "done", text=part["text"]),
            self._event("content_part.done", **self._place, part=part),
            done,
        ]

    def _end(self) -> list[dict[str, Any]]:
        answer = self._answer()
        self._keep(answer)
        return [self._event(self._status, response=answer)]

    def _text_event(self, kind: str, what: str, /, **fields: Any) -> dict[str, Any]:
        if kind == "reasoning":
            return self._event(f"reasoning_text.{what}", **self._place, **fields)
        if kind == "content":
            return self._event(f"output_text.{what}", **self._place, **fields, logprobs=[])
        place = self._place
        del place["content_index"]
        name = "function_call_arguments" if kind == "function" else "custom_tool_call_input"
        return self._event(f"{name}.{what}", **place, **fields)

    @property
    def _place(self) -> dict[str, Any]:
        """Returns the fields of an event that name the last block."""
        index = len(self._blocks) - 1
        return {"item_id": self._item_id(index), "output_index": index, "content_index": 0}


def _call_names(kind: str) -> tuple[str, str]:
    """Returns the type of the item of a call, and the name of the field with its text."""
    return ("custom_tool_call", "input") if kind == "custom" else ("function_call", "arguments")


def _without_effect(request: ResponsesRequest, *, is_stored: bool) -> list[str]:
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


def _write_stream_error(error: ApiError) -> dict[str, Any]:
    return {
        "type": "error",
        "code": error.code or error.type,
        "message": error.message,
        "param": error.param,
    }


DIALECT = Dialect(
    beginnings=("/v1/responses",),
    stream_error=_write_stream_error,
    new_frame=numbered_events,
    conversations={"/v1/responses": open_response},
    operations={"/v1/responses": "chat"},
    document=DOCUMENT,
)
