"""Translates requests to POST /v1/responses into chats.

Only text is supported. The server stores nothing: a client sends the conversation with each
request.
"""

from __future__ import annotations

import time
from typing import Any

from jaxpage.serving.dialects.dialect import Dialect
from jaxpage.serving.dialects.responses_fields import (
    DOCUMENT,
    ResponsesReasoning,
    ResponsesRequest,
    ResponsesSchemaFormat,
)
from jaxpage.serving.dialects.translating import Block, InBlocks
from jaxpage.serving.wire.chat_completions import open_chat
from jaxpage.serving.wire.context import ModelContext
from jaxpage.serving.wire.encoding import numbered_events
from jaxpage.serving.wire.errors import ApiError, quotes
from jaxpage.serving.wire.reading import read
from jaxpage.settings.field_table import names_in

# The names of parameters in this API, by their names in chats.
_NAMES = names_in("responses")


@quotes
def open_response(body: dict[str, Any], context: ModelContext) -> ResponseAnswer:
    """Returns the exchange of a request to POST /v1/responses.

    Raises:
        ApiError: The request is refused.
    """
    request, ignored = read(body, ResponsesRequest, context)
    return ResponseAnswer(request, context, ignored)


def _chat_of(request: ResponsesRequest) -> dict[str, Any]:
    text_format = request.text.format if request.text else None
    if isinstance(text_format, ResponsesSchemaFormat):
        schema = text_format.model_dump(by_alias=True, exclude={"type"})
        response_format: dict[str, Any] | None = {"type": "json_schema", "json_schema": schema}
    else:
        response_format = text_format.model_dump() if text_format else None
    return {
        "messages": _messages(request),
        "max_completion_tokens": request.max_output_tokens,
        "response_format": response_format,
        "stream": request.stream,
        **{name: getattr(request, theirs) for name, theirs in _NAMES.items()},
    }


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    reasoning = None
    for item in request.input:
        if isinstance(item, ResponsesReasoning):
            reasoning = "".join(part.text for part in item.content or [])
            continue
        content: Any = item.content
        if not isinstance(content, str):
            content = [{"type": "text", "text": part.text} for part in content]
        thought = {"reasoning_content": reasoning} if reasoning and item.role == "assistant" else {}
        messages.append({"role": item.role, "content": content, **thought})
        reasoning = None
    return messages


class ResponseAnswer(InBlocks):
    """Answers with one response, whose blocks are output items of one part each."""

    _prefix = "resp"
    _names = {  # noqa: RUF012
        **dict.fromkeys(("messages", "prompt"), "input"),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
        "response_format": "text.format",
        "response_format.json_schema.schema": "text.format.schema",
    }

    def __init__(
        self, request: ResponsesRequest, context: ModelContext, ignored_fields: tuple[str, ...]
    ) -> None:
        super().__init__(open_chat, _chat_of(request), context, request.model, ignored_fields)
        self._request = request
        self._created = int(time.time())

    def _answer(self) -> dict[str, Any]:
        request = self._request
        params = self.prompts[0].params
        is_cut = self._ending.get("finish_reason") == "length"
        last = len(self._blocks) - 1
        output = [
            self._item(index, self._status if index == last else "completed")
            for index in range(last + 1)
        ]
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": getattr(params, "temperature", None),
            "text": request.text.model_dump(by_alias=True, exclude_none=True)
            if request.text
            else {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": getattr(params, "top_p", None),
            "truncation": "disabled",
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
        kind = self._blocks[index].kind
        item_id = self._item_id(index)
        content = [] if is_empty else [self._part(index)]
        if kind == "reasoning":
            return {
                "id": item_id,
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": content,
            }
        return {
            "id": item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _item_id(self, index: int) -> str:
        prefix = "rs" if self._blocks[index].kind == "reasoning" else "msg"
        return f"{prefix}_{self.id.removeprefix('resp_')}_{index}"

    def _part(self, index: int) -> dict[str, Any]:
        block = self._blocks[index]
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{name}", **fields}

    def _begin(self) -> list[dict[str, Any]]:
        return [self._event(name, response=self._answer()) for name in ("created", "in_progress")]

    def _open_block(self, block: Block) -> list[dict[str, Any]]:
        index = len(self._blocks) - 1
        item = self._item(index, "in_progress", is_empty=True)
        added = self._event("output_item.added", output_index=index, item=item)
        return [added, self._event("content_part.added", **self._place, part=self._part(index))]

    def _add_to_block(self, block: Block, text: str) -> list[dict[str, Any]]:
        return [self._text_event(block.kind, "delta", delta=text)]

    def _close_block(self, block: Block) -> list[dict[str, Any]]:
        index = len(self._blocks) - 1
        part = self._part(index)
        status = self._status if self._ending else "completed"
        return [
            self._text_event(block.kind, "done", text=part["text"]),
            self._event("content_part.done", **self._place, part=part),
            self._event("output_item.done", output_index=index, item=self._item(index, status)),
        ]

    def _end(self) -> list[dict[str, Any]]:
        return [self._event(self._status, response=self._answer())]

    def _text_event(self, kind: str, what: str, **fields: Any) -> dict[str, Any]:
        if kind == "reasoning":
            return self._event(f"reasoning_text.{what}", **self._place, **fields)
        return self._event(f"output_text.{what}", **self._place, **fields, logprobs=[])

    @property
    def _place(self) -> dict[str, Any]:
        """Returns the fields of an event that name the last block."""
        index = len(self._blocks) - 1
        return {"item_id": self._item_id(index), "output_index": index, "content_index": 0}


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
    exchanges={"/v1/responses": open_response},
    operations={"/v1/responses": "chat"},
    document=DOCUMENT,
)
