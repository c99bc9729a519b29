"""Translates requests to POST /v1/responses into chats.

Text and pictures are supported. The server keeps the answers for a while, within bounds, so that a
request may go on from one of them by `previous_response_id`, or name items of them.
"""

from __future__ import annotations

import time
from typing import Any

from jaxpage.outputs import RequestOutput
from jaxpage.serving.dialects.dialect import ConversationPath, Dialect, StreamForm
from jaxpage.serving.dialects.responses_fields import DOCUMENT, ResponsesRequest
from jaxpage.serving.dialects.responses_items import ChatMessage, encode_reasoning
from jaxpage.serving.dialects.responses_requests import (
    RequestedConversation,
    chat_of,
    names_of_tools,
    truncate_messages,
    without_effect,
)
from jaxpage.serving.dialects.translating import AnswerBlock, InBlocks
from jaxpage.serving.requests.response_store import (
    KEEPS_NOTHING,
    OwnerResponses,
    StoredResponse,
)
from jaxpage.serving.wire.chat_completions import open_chat
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.encoding import encode_parts, number_events
from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import Exchange
from jaxpage.serving.wire.reading import read
from jaxpage.serving.wire.relaxing import name_paths

_PREFIXES = {"reasoning": "rs", "content": "msg", "function": "fc", "custom": "ctc"}


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
        conversation = RequestedConversation(request, body, responses)
        messages = conversation.messages
        dropped: list[ChatMessage] = []
        if request.truncation == "auto":
            messages, dropped = truncate_messages(messages, request, context)
        self._names = {**type(self)._names, **names_of_tools(request.tools)}
        for index, message in enumerate(messages):
            self._names |= message.names(index)
        chat = {**chat_of(request), "messages": [message.body for message in messages]}
        paths = (*conversation.ignored, *(message.paths[""] for message in dropped))
        self._responses = responses
        self._conversation = b""
        if may_store := request.store is not False and responses.keeps:
            self._conversation = b"".join(encode_parts(conversation.items))
        self._is_stored = may_store and responses.has_room(self._conversation)
        ignored = (*ignored_fields, *without_effect(request, is_stored=self._is_stored))
        ignored += name_paths(tuple(dict.fromkeys(paths)))
        super().__init__(open_chat, chat, context, request.model, ignored)
        self._request = request
        self._body = body
        self._shows_encoded = "reasoning.encrypted_content" in (request.include or ())
        self._created = int(time.time())
        self._error: ApiError | None = None

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Returns the response where the request does not stream; see `Exchange`."""
        answer = super().whole(outputs)
        self._keep(answer)
        return answer

    def fail(self, error: ApiError) -> list[dict[str, Any]]:
        """Ends the answer with an error, and returns the events that end its stream.

        What was said so far stays in the response, which is kept as one that failed.
        """
        events = [] if self._has_begun else self._begin()
        self._error = error
        answer = self._answer()
        self._keep(answer)
        return [*events, _write_stream_error(error), self._event(self._status, response=answer)]

    def _keep(self, answer: dict[str, Any]) -> None:
        """Keeps an answer that has ended; it is there before the client knows of it."""
        if self._is_stored:
            response = b"".join(encode_parts(answer))
            self._responses.put(self.id, StoredResponse(self._conversation, response))

    def _answer(self) -> dict[str, Any]:
        request = self._request
        params = self.prompts[0].params
        is_cut = self._ending.get("finish_reason") == "length"
        output = [self._item(index, self._status_of(index)) for index in range(len(self._blocks))]
        text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._has_ended else None,
            "status": self._status,
            "background": False,
            "error": self._error and _write_error(self._error),
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
            "usage": self._usage_body() if self._has_ended else None,
            "user": request.user,
            **self._receipt,
        }

    @property
    def _has_ended(self) -> bool:
        """Returns whether the answer has come to its end, which one that failed has not."""
        return bool(self._ending) and self._error is None

    @property
    def _status(self) -> str:
        if self._error is not None:
            return "failed"
        if not self._ending:
            return "in_progress"
        return "incomplete" if self._ending["finish_reason"] == "length" else "completed"

    def _status_of(self, index: int) -> str:
        """Returns the status of an item: that of the answer if nothing is said after it."""
        later = self._blocks[index + 1 :]
        if any(block.is_call or block.text for block in later):
            return "completed"
        return "incomplete" if self._error is not None else self._status

    def _usage_body(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
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

    def _open_block(self, block: AnswerBlock) -> list[dict[str, Any]]:
        index = len(self._blocks) - 1
        item = self._item(index, "in_progress", is_empty=True)
        added = self._event("output_item.added", output_index=index, item=item)
        if block.is_call:
            return [added]
        return [added, self._event("content_part.added", **self._place, part=self._part(index))]

    def _add_to_block(self, block: AnswerBlock, text: str) -> list[dict[str, Any]]:
        return [self._text_event(block.kind, "delta", delta=text)] if text else []

    def _close_block(self, block: AnswerBlock) -> list[dict[str, Any]]:
        index = len(self._blocks) - 1
        status = self._status_of(index) if self._ending else "completed"
        done = self._event("output_item.done", output_index=index, item=self._item(index, status))
        if block.is_call:
            _, text_field = _call_names(block.kind)
            fields = {text_field: block.text, "name": block.name}
            return [self._text_event(block.kind, "done", **fields), done]
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

    def _text_event(self, kind: str, stage: str, /, **fields: Any) -> dict[str, Any]:
        if kind == "reasoning":
            return self._event(f"reasoning_text.{stage}", **self._place, **fields)
        if kind == "content":
            return self._event(f"output_text.{stage}", **self._place, **fields, logprobs=[])
        place = self._place
        del place["content_index"]
        name = "function_call_arguments" if kind == "function" else "custom_tool_call_input"
        return self._event(f"{name}.{stage}", **place, **fields)

    @property
    def _place(self) -> dict[str, Any]:
        """Returns the fields of an event that name the last block."""
        index = len(self._blocks) - 1
        return {"item_id": self._item_id(index), "output_index": index, "content_index": 0}


def _call_names(kind: str) -> tuple[str, str]:
    """Returns the type of the item of a call, and the name of the field with its text."""
    return ("custom_tool_call", "input") if kind == "custom" else ("function_call", "arguments")


def _write_stream_error(error: ApiError) -> dict[str, Any]:
    return {
        "type": "error",
        "code": error.code or error.type,
        "message": error.message,
        "param": error.param,
    }


def _write_error(error: ApiError) -> dict[str, Any]:
    """Returns the error of a response that failed, with a code that clients of OpenAI know."""
    code = "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
    if error.status >= 500:
        code = "server_error"
    return {"code": error.code or code, "message": error.message}


def _fail(error: ApiError, exchange: Exchange | None) -> list[dict[str, Any]]:
    if isinstance(exchange, ResponseAnswer):
        return exchange.fail(error)
    return [_write_stream_error(error)]


DIALECT = Dialect(
    beginnings=("/v1/responses",),
    stream=StreamForm(new_frame=number_events, fail=_fail),
    paths={"/v1/responses": ConversationPath(open_response, is_for_batches=True)},
    document=DOCUMENT,
)
